"""Every shape of configs/ on a described TPU: its step lowers, or start-up refuses it in words; and
page tables of automatic sizes fit the chip's scalar memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jserve.cache.pool import pool_spec
from jserve.config import Config, DeviceFacts, resolve
from jserve.errors import ConfigError
from jserve.models.registry import build_model, parse_config
from jserve.plan import Kind
from jserve.runner.buckets import Buckets
from jserve.runner.memory import local_bytes, temporary_bytes
from jserve.runner.programs import Programs
from jserve.runner.shapes import Shapes
from jserve.types import KVShape, ModelConfig
from jserve.types.kv_layout import KV_LAYOUTS, table_pages
from pallas_kernels.attention import AttentionMeta, KVLayer, attend
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
V5E = DeviceFacts("tpu", "TPU v5 lite", 4, 16 << 30)
#: Why a shape is not served on TPU; None: it is.
REFUSED = {
    "smollm2-135m": None,
    "qwen3-0.6b": None,
    "gemma-3-270m": "heads of 256 numbers",
    "gpt-oss-20b": "attention sinks",
    "deepseek-v2-lite": "caches latents",
    "qwen3-8b": None,
    "qwen3-30b-a3b": None,
    "llama-3.1-8b": None,
    "mistral-7b": None,
    "deepseek-v3": "caches latents",
}
EVERYDAY = ("smollm2-135m", "gemma-3-270m", "gpt-oss-20b")


def chips() -> list:
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


def shape_of(name: str) -> ModelConfig:
    return parse_config(json.loads((CONFIGS / f"{name}.json").read_text()))


def small(name: str, layers: int) -> ModelConfig:
    config = shape_of(name)
    moe = config.moe and dataclasses.replace(
        config.moe, sparse_layers=config.moe.sparse_layers[:layers]
    )
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers], moe=moe)


def programs_of(config: ModelConfig, slots: int, page_size: int, context: int) -> Programs:
    rules = Rules(make_mesh(chips(), tensor=1), TP)
    model = build_model(
        config, rules, dtype="bfloat16", attention_backend=None, page_size=page_size
    )
    sizes = {"num_slots": slots, "page_size": page_size, "context_length": context}
    shapes = Shapes(model, rules, num_pages=64, kv_dtype="bfloat16", **sizes)
    return Programs(shapes, Buckets.of(slots, 16))


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in REFUSED]
)
def test_a_shape_lowers_for_tpu_or_is_refused(name: str) -> None:
    reason, config = REFUSED[name], small(name, 1)
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            programs_of(config, 4, 16, 256)
        return
    for kind, size in ((Kind.DECODE, 4), (Kind.MIXED, 16)):
        text = programs_of(config, 4, 16, 256).forward(kind, size).lower().as_text()
        assert "tpu_custom_call" in text, "the Pallas kernel is not in the program"


def test_every_shape_file_is_in_the_table() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(REFUSED)


def test_short_and_few_heads_are_padded_in_a_tpus_pool_and_in_its_size() -> None:
    pool = programs_of(small("smollm2-135m", 1), 4, 16, 256).shapes.kv
    assert pool.v is None and pool.k.shape == (64, 16, 2 * 4, 128), "3 heads of 64"
    rules = Rules(make_mesh(chips(), tensor=4), TP)
    page = pool_spec(KVShape(2, 4, 64), 1, 16, "bfloat16", rules)
    assert local_bytes(jax.tree.leaves(page)) == 2 * 16 * 2 * 128 * 2


def compiled_attention(name: str, slots: int, pages: int, page_size: int) -> jax.stages.Compiled:
    """One decode call with the heads of a shape on one chip, with page tables of so many pages."""
    config = shape_of(name)
    group = config.num_heads // config.num_kv_heads
    kv_heads = KV_LAYOUTS["tpu"].heads(config.num_kv_heads, 1)
    mesh = Mesh(np.array(chips()[:1]), ("tensor",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, whole))

    rows = array(slots)
    meta = AttentionMeta(
        array(slots + 1), rows, array(slots, pages), rows, rows, rows, array(2), max_q_len=1
    )
    q = array(slots, group * kv_heads, config.head_dim, dtype="bfloat16")
    k = array(slots, kv_heads, config.head_dim, dtype="bfloat16")
    pool = array(64, page_size, 2 * kv_heads, 128, dtype="bfloat16")

    def step(q, k, v, pool, first_page, meta):
        layer = KVLayer(pool, None, first_page)
        out, layer = attend(q, k, v, layer, meta, scale=0.1, platform="tpu")
        return out, layer.k

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(whole,) * 6, out_specs=(whole, whole), check_vma=False
    )
    traced = jax.jit(sharded, donate_argnums=3).trace(q, k, k, pool, array(), meta)
    return traced.lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize(
    "name",
    [
        n if n == "llama-3.1-8b" else pytest.param(n, marks=pytest.mark.full)
        for n, reason in REFUSED.items()
        if reason is None
    ],
)
def test_the_page_tables_of_default_sizes_fit_a_chip(name: str) -> None:
    found = resolve(Config.from_flags(model_path=name), shape_of(name), V5E)
    pages = table_pages(found.context_length, found.page_size)
    text = compiled_attention(name, found.num_slots, pages, found.page_size).as_text()
    assert text is not None and "tpu_custom_call" in text


@pytest.mark.full
def test_the_bound_of_page_tables_is_near_what_a_chip_has() -> None:
    layout, slots = KV_LAYOUTS["tpu"], 256
    most = layout.most_pages(slots)
    assert compiled_attention("qwen3-0.6b", slots, most, 16)
    assert compiled_attention("qwen3-0.6b", layout.most_slots(128), 128, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED.*smem"):
        compiled_attention("qwen3-0.6b", slots, most + 129, 16)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b"])
def test_a_step_of_default_sizes_compiles(name: str, kind: Kind) -> None:
    found = resolve(Config.from_flags(model_path=name), shape_of(name), V5E)
    made = programs_of(small(name, 1), found.num_slots, found.page_size, found.context_length)
    size = found.num_slots if kind is Kind.DECODE else 16
    compiled = made.forward(kind, size).lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    live = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    assert temporary_bytes(compiled, "tpu") >= live > 0
