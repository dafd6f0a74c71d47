"""Opening checkpoints, and streaming them into sharded parameters."""

from __future__ import annotations

import dataclasses
import functools
import json
import tracemalloc
import weakref
from collections.abc import Callable, KeysView, Mapping, Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jserve.errors import ConfigError, WeightError
from jserve.models.architectures import find_architecture
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.hf import SafetensorsSource, find_shards
from jserve.weights.loader import load_params, stream_params
from jserve.weights.orbax import save_params, take_apart
from jserve.weights.spec import Piece, WeightSpec
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

WIDTH, HIDDEN = 16, 8


@dataclasses.dataclass(frozen=True)
class Source:
    model_path: str
    revision: str | None = None
    load_format: str = "auto"


def rules_for(tensor: int) -> Rules:
    return Rules(make_mesh(jax.devices(), tensor=tensor), TP)


def ignore(done: int, total: int) -> None:
    pass


def place_half(half: int, shards: int, target: np.ndarray, tensor: np.ndarray) -> None:
    """Gate and up interleaved in blocks, so that the layout depends on the mesh."""
    blocks = target.reshape(HIDDEN, shards, 2, WIDTH // shards)
    blocks[:, :, half, :] = tensor.T.reshape(HIDDEN, shards, WIDTH // shards)


def place_whole(target: np.ndarray, tensor: np.ndarray) -> None:
    target[...] = tensor


def place_twice(target: np.ndarray, tensor: np.ndarray) -> None:
    """Replicated, and padded by a row that no tensor fills."""
    target[: 2 * len(tensor)] = np.repeat(tensor, 2, axis=0)


def fused(shards: int, dtype: str = "float32", layer: int = 0) -> WeightSpec:
    names = (f"layers.{layer}.gate", f"layers.{layer}.up")
    pieces = tuple(
        Piece(name, (WIDTH, HIDDEN), functools.partial(place_half, half, shards))
        for half, name in enumerate(names)
    )
    return WeightSpec(f"{layer}.gate_up", (HIDDEN, 2 * WIDTH), dtype, (None, "mlp"), pieces)


def norm(layer: int = 0) -> WeightSpec:
    piece = Piece(f"layers.{layer}.norm", (HIDDEN,), place_whole)
    return WeightSpec(f"{layer}.norm", (HIDDEN,), "float32", (None,), (piece,), init_value=1.0)


def tensors_of(layers: int = 1, dtype: object = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    named: dict[str, np.ndarray] = {"rotary.inv_freq": np.ones(3, np.float32)}  # nobody asks for it
    for layer in range(layers):
        for half in ("gate", "up"):
            named[f"layers.{layer}.{half}"] = rng.normal(size=(WIDTH, HIDDEN)).astype(dtype)
        named[f"layers.{layer}.norm"] = rng.normal(size=HIDDEN).astype(dtype)
    return named


def write_folder(folder: Path, shards: Sequence[Mapping[str, np.ndarray]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        safetensors.numpy.save_file(dict(shard), folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def expected_fused(named: Mapping[str, np.ndarray], shards: int, layer: int = 0) -> np.ndarray:
    gate, up = (named[f"layers.{layer}.{half}"].T for half in ("gate", "up"))
    blocks = zip(np.split(gate, shards, axis=1), np.split(up, shards, axis=1), strict=True)
    return np.concatenate([half for pair in blocks for half in pair], axis=1)


def load(folder: Path, specs: Sequence[WeightSpec], tensor: int = 2) -> dict[str, jax.Array]:
    checkpoint = open_checkpoint(Source(str(folder)))
    return load_params(specs, checkpoint, rules_for(tensor), "float32", progress=ignore)


class CountingSource:
    """In memory; counts how many tensors are alive at once and in which order they are read."""

    def __init__(self, shards: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        self._shapes = {name: shape for shard in shards for name, shape in shard.items()}
        self._files = {name: Path(f"shard{i}") for i, shard in enumerate(shards) for name in shard}
        self.files = tuple(dict.fromkeys(self._files.values()))
        self.order: list[str] = []
        self.alive = self.most_alive = 0

    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file(self, name: str) -> Path:
        return self._files[name]

    def read(self, name: str) -> np.ndarray:
        tensor = np.full(self._shapes[name], len(self.order), np.float32)
        self.order.append(name)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_sharded_safetensors_fill_fused_parameters_on_a_mesh(tmp_path: Path, dtype: object) -> None:
    named = tensors_of(dtype=dtype)
    up = {"layers.0.up": named.pop("layers.0.up")}  # the pieces of one parameter lie in two files
    folder = write_folder(tmp_path / "m", [named, up])
    params = load(folder, [fused(2), norm()])
    want = expected_fused({**named, **up}, 2).astype(np.float32)
    np.testing.assert_array_equal(params["0.gate_up"], want)
    np.testing.assert_array_equal(params["0.norm"], named["layers.0.norm"].astype(np.float32))
    shards = params["0.gate_up"].addressable_shards
    assert [s.data.shape for s in shards] == [(HIDDEN, WIDTH)] * 2
    assert len(params["0.norm"].addressable_shards) == 2


def test_a_single_file_is_converted_to_the_specs_dtype(tmp_path: Path) -> None:
    named = tensors_of()
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    safetensors.numpy.save_file(named, tmp_path / "consolidated.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert [f.name for f in find_shards(tmp_path)] == ["model.safetensors"]
    params = load(tmp_path, [fused(1, "bfloat16")], tensor=1)
    assert params["0.gate_up"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        params["0.gate_up"], expected_fused(named, 1).astype(ml_dtypes.bfloat16)
    )


def test_a_spec_without_dtype_takes_the_models() -> None:
    spec = dataclasses.replace(norm(), dtype="")
    source = CountingSource([{"layers.0.norm": (HIDDEN,)}])
    params = stream_params([spec], source, rules_for(1), "bfloat16", progress=ignore)
    assert params["0.norm"].dtype == ml_dtypes.bfloat16


def test_each_tensor_is_read_once_file_by_file_and_one_is_alive_at_a_time() -> None:
    shapes = {name: tensor.shape for name, tensor in tensors_of(layers=4).items()}
    names = list(shapes)
    shards = [{name: shapes[name] for name in part} for part in (names[:5], names[5:])]
    source = CountingSource(shards)
    seen: list[tuple[int, int]] = []
    specs = [spec for layer in range(4) for spec in (fused(2, layer=layer), norm(layer))]
    params = stream_params(
        specs,
        source,
        rules_for(2),
        "float32",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert source.order == [name for name in names if name != "rotary.inv_freq"]
    assert source.most_alive == 1
    assert list(params) == [spec.path for spec in specs]
    assert seen == [(i + 1, 8) for i in range(8)]


def test_peak_host_memory_is_the_model_and_less_than_a_shard() -> None:
    rows, columns, layers = 256, 512, 16
    shape = (rows, columns)
    specs = [
        WeightSpec(str(i), shape, "float32", (None, None), (Piece(f"w{i}", shape, place_whole),))
        for i in range(layers)
    ]
    source = CountingSource(
        [{f"w{i}": shape for i in range(s, s + 4)} for s in range(0, layers, 4)]
    )
    tensor_bytes = rows * columns * 4
    tracemalloc.start()
    params = stream_params(specs, source, rules_for(1), "float32", progress=ignore)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(params) == layers
    model, shard = layers * tensor_bytes, 4 * tensor_bytes
    assert 2 * tensor_bytes < peak < model + shard, f"{peak=} {model=} {shard=}"


def test_missing_and_misshapen_tensors_are_named_before_anything_is_read(tmp_path: Path) -> None:
    named = tensors_of()
    folder = write_folder(tmp_path / "m", [named])
    with pytest.raises(
        WeightError, match=r"model-00001-of-00001.safetensors: tensor layers.1.gate is missing"
    ):
        load(folder, [fused(2), fused(2, layer=1)])
    wrong = Piece("layers.0.norm", (HIDDEN + 1,), place_whole)
    spec = dataclasses.replace(norm(), pieces=(wrong,))
    with pytest.raises(
        WeightError, match=r"00001.safetensors: tensor layers.0.norm has shape \(8,\).*\(9,\)"
    ):
        load(folder, [spec])


@pytest.mark.parametrize("keep", [4, 60, -10])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    folder = write_folder(tmp_path / "m", [tensors_of()])
    file = folder / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model-00001-of-00001.safetensors: truncated") as caught:
        load(folder, [norm()])
    if keep < 0:
        assert "tensor " in str(caught.value)


def test_a_broken_header_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((10).to_bytes(8, "little") + b'{"w": nope' + bytes(8))
    with pytest.raises(WeightError, match=r"model.safetensors: the safetensors header is broken"):
        SafetensorsSource([file])


def test_a_shard_that_the_index_lists_must_exist(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", [tensors_of(), {"extra": np.ones(1, np.float32)}])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightError, match=r"00002-of-00002.safetensors: no such file"):
        load(folder, [norm()])


def test_of_two_indexes_and_of_copies_the_right_ones_are_read(tmp_path: Path) -> None:
    named = tensors_of()
    stale = {name: tensor + 9 for name, tensor in named.items()}
    folder = write_folder(tmp_path / "m", [named, {"extra": np.ones(1, np.float32)}])
    safetensors.numpy.save_file(stale | {"extra": stale["layers.0.norm"]}, folder / "z.safetensors")
    second = folder / "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file(stale | {"extra": np.ones(1, np.float32)}, second)
    safetensors.numpy.save_file(stale, folder / "consolidated-00001-of-00001.safetensors")
    listed = dict.fromkeys(stale, "consolidated-00001-of-00001.safetensors")
    own = folder / "consolidated.safetensors.index.json"
    own.write_text(json.dumps({"weight_map": listed}))
    assert len(find_shards(folder)) == 2
    np.testing.assert_array_equal(load(folder, [norm()])["0.norm"], named["layers.0.norm"])
    for other in folder.glob("model*"):
        other.unlink()
    (folder / "z.safetensors").unlink()
    np.testing.assert_array_equal(load(folder, [norm()])["0.norm"], stale["layers.0.norm"])


def test_variants_without_an_index_are_no_second_copy(tmp_path: Path) -> None:
    named = tensors_of()
    folder = write_folder(tmp_path / "m", [named])
    (folder / "model.safetensors.index.json").unlink()
    variant = {name: tensor + 9 for name, tensor in named.items()}
    safetensors.numpy.save_file(variant, folder / "model.fp16-00001-of-00001.safetensors")
    np.testing.assert_array_equal(load(folder, [norm()])["0.norm"], named["layers.0.norm"])
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.bf16.safetensors")
    with pytest.raises(WeightError, match="is in model.bf16.safetensors too; remove one"):
        load(folder, [norm()])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, ml_dtypes.float8_e4m3fn])
def test_tensors_that_are_no_plain_numbers_are_refused(tmp_path: Path, dtype: type) -> None:
    import safetensors.torch
    import torch

    packed = torch.zeros(HIDDEN).to(getattr(torch, np.dtype(dtype).name))
    safetensors.torch.save_file({"layers.0.norm": packed}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightError, match=r"layers.0.norm is \S+, which needs scales"):
        load(tmp_path, [norm()], tensor=1)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a.norm.weight_scale", "is quantized"),
        ("a.norm.scales", "is quantized"),
        ("a.norm.bias", "would be ignored"),
    ],
)
def test_what_a_weight_needs_is_not_ignored(tmp_path: Path, name: str, why: str) -> None:
    of_weight = Piece("a.norm.weight", (HIDDEN,), place_whole)
    spec = dataclasses.replace(norm(), pieces=(of_weight,))
    plain = {"a.norm.weight": np.ones(HIDDEN, np.float32), "b.norm.bias": np.ones(1, np.float32)}
    load(write_folder(tmp_path / "plain", [plain]), [spec])
    folder = write_folder(tmp_path / "m", [plain | {name: np.ones(1, np.float32)}])
    with pytest.raises(WeightError, match=f"00001.safetensors: tensor {name} .*{why}"):
        load(folder, [spec])


def test_paths_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        open_checkpoint(Source(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"config.json: no such file; a model is a folder with"):
        open_checkpoint(Source(str(tmp_path)))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"architectures": ["Foo"]}')
    with pytest.raises(ConfigError, match="no weights found"):
        open_checkpoint(Source(str(tmp_path / "bare")))
    with pytest.raises(ConfigError, match="Foo is not supported; known: Llama"):
        open_checkpoint(Source(str(tmp_path / "bare")), find_architecture)
    folder = write_folder(tmp_path / "m", [tensors_of()])
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        open_checkpoint(Source(str(folder)))
    for broken in ("{", "[" * 100_000, "[]", ""):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"config.json: (not valid JSON|a JSON object is)"):
            open_checkpoint(Source(str(folder)))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        open_checkpoint(Source(str(tmp_path / "notes.txt")))


@pytest.mark.parametrize("asked", ["gguf", "orbax"])
def test_a_load_format_that_does_not_fit_is_refused(tmp_path: Path, asked: str) -> None:
    folder = write_folder(tmp_path / "m", [tensors_of()])
    with pytest.raises(ConfigError, match=f"--load-format {asked} does not fit .* safetensors"):
        open_checkpoint(Source(str(folder), load_format=asked))
    assert open_checkpoint(Source(str(folder), load_format="safetensors")).kind == "safetensors"


def test_a_shape_file_needs_the_dummy_format(tmp_path: Path) -> None:
    shape = tmp_path / "tiny.json"
    shape.write_text('{"model_type": "llama", "vocab_size": 64}')
    with pytest.raises(ConfigError, match="--load-format dummy"):
        open_checkpoint(Source(str(shape)))
    checkpoint = open_checkpoint(Source(str(shape), load_format="dummy"))
    assert checkpoint.kind == "dummy"
    assert checkpoint.hf_config["vocab_size"] == 64


def test_random_weights_are_sharded_and_do_not_depend_on_the_mesh() -> None:
    checkpoint = Checkpoint("dummy", Path("x"), {}, {})
    spec = dataclasses.replace(fused(1), shape=(64, 64), init_scale=0.5)
    loaded = {
        tensor: load_params(
            [spec, norm()], checkpoint, rules_for(tensor), "float32", progress=ignore, seed=3
        )
        for tensor in (1, 4)
    }
    one, four = loaded[1]["0.gate_up"], loaded[4]["0.gate_up"]
    np.testing.assert_allclose(one, four, rtol=1e-6)
    assert [s.data.shape for s in four.addressable_shards] == [(64, 16)] * 4
    assert 0.45 < float(np.std(one)) < 0.55
    np.testing.assert_array_equal(loaded[4]["0.norm"], np.ones(HIDDEN))
    other = load_params([spec], checkpoint, rules_for(1), "float32", progress=ignore, seed=4)
    assert not np.array_equal(one, other["0.gate_up"])


@pytest.mark.parametrize("place", [place_whole, place_twice])
def test_taking_a_parameter_apart_undoes_its_fusing(
    place: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    tensor = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    rows = 4 if place is place_whole else 9
    spec = WeightSpec("w", (rows, 3), "float32", (None, None), (Piece("w", (4, 3), place),))
    param = np.zeros(spec.shape, np.float32)
    place(param, tensor)
    np.testing.assert_array_equal(take_apart(spec, param)["w"], tensor)


def test_orbax_goes_from_one_mesh_to_another(tmp_path: Path) -> None:
    named = tensors_of()
    folder = write_folder(tmp_path / "m", [named])
    (folder / "tokenizer.json").write_text("{}")
    params = load(folder, [fused(2, "bfloat16"), norm()], tensor=2)
    saved = tmp_path / "saved"
    config = {"model_type": "llama", "vocab_size": 3}
    save_params(
        saved, params, [fused(2, "bfloat16"), norm()], config,
        generation_config={"eos_token_id": 2}, tokenizer_dir=folder,
    )  # fmt: skip
    checkpoint = open_checkpoint(Source(str(saved)))
    assert (checkpoint.kind, checkpoint.hf_config) == ("orbax", config)
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert (saved / "tokenizer.json").is_file()
    restored = load(saved, [fused(4, "bfloat16"), norm()], tensor=4)
    assert len(restored["0.gate_up"].addressable_shards) == 4
    np.testing.assert_array_equal(
        restored["0.gate_up"], expected_fused(named, 4).astype(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(restored["0.norm"], named["layers.0.norm"])
    with pytest.raises(WeightError, match=r"orbax: tensor layers.7.norm is missing"):
        load(saved, [norm(7)])
    with pytest.raises(ConfigError, match="already holds"):
        save_params(saved, params, [norm()], config)


def test_a_damaged_orbax_checkpoint_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "orbax").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(WeightError, match="orbax: not a whole Orbax checkpoint"):
        load(folder, [norm()])
