"""Qwen3-8B's steps compile for a real TPU slice, by libtpu, on a machine without one: sizes fit and
the pool is in place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from collectives import collectives
from jax.experimental import topologies

from jserve.models.registry import build_model, parse_config
from jserve.plan import Kind
from jserve.runner.buckets import Buckets
from jserve.runner.programs import Programs
from jserve.runner.shapes import Shapes
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

SHAPE = Path(__file__).parents[1] / "configs" / "qwen3-8b.json"
V5E_HBM = 15.75 * 2**30  # bytes that a v5e chip lets a program use


def tpu_programs(num_layers: int, num_pages: int) -> Programs:
    """The step programs of Qwen3-8B with `num_layers` layers on v5e:2x2, tensor parallel 4, 16
    slots."""
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    rules = Rules(make_mesh(devices, tensor=4), TP)
    config = parse_config(json.loads(SHAPE.read_text()))
    config = dataclasses.replace(config, num_layers=num_layers, windows=config.windows[:num_layers])
    model = build_model(config, rules, dtype="bfloat16", attention_backend=None, page_size=64)
    shapes = Shapes(
        model,
        rules,
        num_slots=16,
        num_pages=num_pages,
        page_size=64,
        context_length=4096,
        kv_dtype="bfloat16",
    )
    return Programs(shapes, Buckets.of(16, 256))


def check(programs: Programs, kind: Kind, size: int) -> None:
    compiled = programs.forward(kind, size).lower().compile()
    text = compiled.as_text()
    assert text is not None and "tpu_custom_call" in text, "the Pallas kernel is not in the program"
    memory = compiled.memory_analysis()
    assert memory is not None
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs.shapes.kv)) // 4
    assert memory.alias_size_in_bytes >= pool, f"{memory.alias_size_in_bytes=} {pool=}"
    assert memory.peak_memory_in_bytes < V5E_HBM, f"{memory.peak_memory_in_bytes=}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", Kind)
def test_a_step_of_four_layers_compiles_with_its_pool_aliased(kind: Kind) -> None:
    programs = tpu_programs(num_layers=4, num_pages=512)
    check(programs, kind, programs.buckets.rows[-1] if kind is Kind.DECODE else 256)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_largest_head_compiles_and_gathers_no_logits() -> None:
    programs = tpu_programs(num_layers=1, num_pages=64)
    told = collectives(programs.head(16, True, True).lower().compile())
    logits = 16 * programs.shapes.vocab * 4
    assert told and max(size for _, size in told) < logits / 64, f"{told=} {logits=}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", Kind)
def test_a_step_of_the_whole_model_compiles_with_its_pool_aliased(kind: Kind) -> None:
    programs = tpu_programs(num_layers=36, num_pages=1024)
    check(programs, kind, programs.buckets.rows[-1] if kind is Kind.DECODE else 256)
