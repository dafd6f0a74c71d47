"""Weights of a mixture of experts from files to the devices of a mesh: what is read, what exists on
the host meanwhile, and what a host of several needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import KeysView
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import checkpoint_state, hf_dict, oracle, rules_of

from jserve.models.registry import build_model, parse_config
from jserve.weights import assembly
from jserve.weights.hf import SafetensorsSource
from jserve.weights.loader import stream_params
from jserve.weights.orbax import OrbaxSource, save_params, take_apart
from jserve.weights.spec import WeightSpec
from sharding.rules import Rules

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8}
SIZES |= {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
MESHES = [(2, 1), (1, 2), (2, 2)]


@dataclasses.dataclass
class Reads:
    """A source that notes which bytes of which file were mapped."""

    source: SafetensorsSource
    spans: dict[Path, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.files

    def names(self) -> KeysView[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def file(self, name: str) -> Path:
        return self.source.file(name)

    def read(self, name: str) -> np.ndarray:
        tensor = self.source.read(name)
        assert isinstance(tensor, np.memmap), "a copy, not the file"
        span = (tensor.offset, tensor.offset + tensor.nbytes)
        self.spans.setdefault(self.file(name), []).append(span)
        return tensor


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return oracle("Qwen3MoeConfig", **SIZES)


@pytest.fixture(scope="module")
def files(theirs: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, the tensors of a layer's experts in both."""
    folder, state = tmp_path_factory.mktemp("files"), checkpoint_state(theirs)
    names, paths = sorted(state), []
    for part in range(2):
        paths.append(folder / f"model-{part}.safetensors")
        save_file({n: state[n].contiguous() for n in names[part::2]}, paths[-1])
    return paths


def specs_of(theirs: torch.nn.Module, rules: Rules) -> tuple[WeightSpec, ...]:
    options = {"dtype": "float32", "attention_backend": None, "page_size": 4}
    return build_model(parse_config(hf_dict(theirs)), rules, **options).specs


def load(source: object, specs: tuple[WeightSpec, ...], rules: Rules) -> dict[str, jax.Array]:
    return stream_params(specs, source, rules, "float32", progress=lambda *_: None)  # type: ignore[arg-type]


def assert_equal(
    params: dict[str, jax.Array], specs: tuple[WeightSpec, ...], theirs: torch.nn.Module
) -> None:
    state, found = checkpoint_state(theirs), {}
    for spec in specs:
        found |= take_apart(spec, np.asarray(params[spec.path]), found)
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, state[name].numpy(), err_msg=name)


@pytest.mark.parametrize(("tp", "ep"), MESHES)
def test_every_byte_is_read_once_and_experts_exist_as_shards_only(
    theirs: torch.nn.Module,
    files: list[Path],
    tp: int,
    ep: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    zeros, rules = np.zeros, rules_of(tp, ep)
    specs, source = specs_of(theirs, rules), Reads(SafetensorsSource(files))

    def noted(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(shape)
        return zeros(shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(assembly.np, "zeros", noted)
        params = load(source, specs, rules)
    for file, spans in source.spans.items():
        ordered = sorted(spans)
        assert spans == ordered, "in the order in which they lie"
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ordered)), "no gap"
        assert ordered[-1][1] == file.stat().st_size
    assert len(source.spans) == 2
    experts = [spec for spec in specs if spec.axes[0] == "expert"]
    assert len(experts) == 2 * 2
    for spec in experts:
        shards = params[spec.path].addressable_shards
        assert len({str(shard.index) for shard in shards}) == tp * ep
        assert spec.shape not in made, "a whole copy on the host"
        assert made.count(shards[0].data.shape) >= tp * ep
        if tp == 1:  # experts go where they belong
            assert spec.shape[1:] not in made
    assert_equal(params, specs, theirs)


def test_a_host_reads_the_experts_of_its_own_devices(
    theirs: torch.nn.Module, files: list[Path]
) -> None:
    """Of two hosts with a device each, the second: what the first would have is never given."""
    rules = rules_of(1, 2)
    specs, source = specs_of(theirs, rules), Reads(SafetensorsSource(files))
    hosts = {}
    for spec in specs:
        (_, mine) = rules.sharding(spec.axes).devices_indices_map(spec.shape).values()
        hosts[spec.path] = assembly.assembly_of(spec, np.dtype(np.float32), [mine])
    for spec in specs:
        for piece in spec.pieces:
            if hosts[spec.path].wants(piece):
                hosts[spec.path].add(piece, source.read(piece.name))
    whole = load(SafetensorsSource(files), specs, rules)
    for spec in specs:
        (_, mine) = rules.sharding(spec.axes).devices_indices_map(spec.shape).values()
        np.testing.assert_array_equal(hosts[spec.path].shard(mine), whole[spec.path][mine])
    read = sum(end - begin for spans in source.spans.values() for begin, end in spans)
    of_experts = sum(4 * int(np.prod(s.shape)) for s in specs if s.axes[0] == "expert")
    everything = sum(4 * int(np.prod(p.shape)) for s in specs for p in s.pieces)
    assert read == everything - of_experts // 2


def test_orbax_goes_from_any_mesh_to_any_other(
    theirs: torch.nn.Module, files: list[Path], tmp_path: Path
) -> None:
    first, second = rules_of(2, 2), rules_of(1, 4)
    specs = specs_of(theirs, first)
    params = load(SafetensorsSource(files), specs, first)
    save_params(tmp_path / "saved", params, specs, hf_dict(theirs))
    specs = specs_of(theirs, second)
    restored = load(OrbaxSource(tmp_path / "saved"), specs, second)
    assert {len(restored[spec.path].sharding.device_set) for spec in specs} == {4}
    assert_equal(restored, specs, theirs)
