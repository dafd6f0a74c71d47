"""Orbax checkpoints: `jserve convert` makes what `jserve serve` takes, and neither holds the whole
model, nor reads metadata once more for each tensor.
"""

from __future__ import annotations

import errno
import functools
import json
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gpt_oss import tiny, write_packed
from test_weights_gguf import HEADS, HIDDEN, KV_HEADS, VOCAB, write
from tiny_models import checkpoint_state, hf_dict, oracle, rules_of

from jserve.__main__ import main
from jserve.config import Config
from jserve.errors import ConfigError, WeightError
from jserve.models.registry import build_model, parse_config
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.sources import byte_source
from jserve.weights import orbax
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.loader import load_params
from jserve.weights.orbax import OrbaxSource, save_tensors

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def opened(path: Path | str) -> Checkpoint:
    return open_checkpoint(Config.from_flags(model_path=str(path)).model)


def params_of(path: Path, tp: int) -> dict[str, jax.Array]:
    checkpoint, rules = opened(path), rules_of(tp)
    config = parse_config(checkpoint.hf_config, checkpoint.generation_config)
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": None, "page_size": 4}
    specs = build_model(config, rules, **options).specs
    return load_params(specs, checkpoint, rules, "float32", progress=lambda *_: None)


def assert_equal(found: dict[str, jax.Array], want: dict[str, jax.Array]) -> None:
    assert found.keys() == want.keys()
    for path, param in want.items():
        np.testing.assert_array_equal(found[path], param, err_msg=path)


def write_hf(folder: Path, model: torch.nn.Module) -> Path:
    """As the hub has it: two kinds of numbers, and a tensor that no model asks for."""
    state = {n: t.contiguous().bfloat16() for n, t in checkpoint_state(model).items()}
    state["model.norm.weight"] = state["model.norm.weight"].float()
    byte_source(96, [1], {"default": TEMPLATE}).save(folder)
    save_file(state | {"model.rotary.inv_freq": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_dict(model)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "README.md").write_text("not for serving")
    return folder


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return oracle("LlamaConfig")


@pytest.fixture
def model(llama: torch.nn.Module, tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", llama)


def test_a_converted_model_is_the_model_on_any_mesh(model: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "made" / "converted"
    assert main(["convert", str(model), str(target)]) == 0
    stored = checkpoint_state(oracle("LlamaConfig"))
    assert capsys.readouterr().out == (
        f"{len(stored)} tensors; serve them with: jserve serve {target}\n"
    )
    before, after = opened(model), opened(target)
    assert (before.kind, after.kind) == ("safetensors", "orbax")
    assert after.hf_config == before.hf_config
    assert after.generation_config == before.generation_config == {"eos_token_id": [1, 5]}
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates"):
        assert (target / name).exists(), name
    assert not (target / "README.md").exists() and not list(target.glob("*.safetensors"))
    assert load_tokenizer(after).encode("<ab>") == load_tokenizer(before).encode("<ab>")
    source = OrbaxSource(target)
    assert source.names() == stored.keys()  # and no rotary.inv_freq
    assert source.read("model.norm.weight").dtype == np.float32
    assert source.read("lm_head.weight").dtype == ml_dtypes.bfloat16
    assert_equal(params_of(target, 2), params_of(model, 2))


def test_a_gguf_file_gets_the_tokenizer_and_template_that_are_given(tmp_path: Path) -> None:
    rng, kv = np.random.default_rng(0), KV_HEADS * HIDDEN // HEADS
    shapes = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q": (HIDDEN, HIDDEN)}
    shapes |= {"attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
    shapes |= {"ffn_gate": (48, HIDDEN), "ffn_up": (48, HIDDEN), "ffn_down": (HIDDEN, 48)}
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named["output_norm.weight"] = HIDDEN
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in named.items()}
    file, target = write(tmp_path / "m.gguf", tensors), tmp_path / "converted"
    byte_source(VOCAB).save(tmp_path / "bytes")
    given = ["--tokenizer-path", str(tmp_path / "bytes"), "--chat-template", TEMPLATE]
    assert main(["convert", str(file), str(target), *given]) == 0
    assert opened(target).hf_config == opened(file).hf_config
    tokenizer = load_tokenizer(opened(target))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "!"}]) == [*b"<!>"]
    assert_equal(params_of(target, 2), params_of(file, 2))


@pytest.mark.full
def test_a_converted_gguf_model_answers_as_the_file_does(tmp_path: Path, capfd) -> None:
    target = tmp_path / "converted"
    assert main(["convert", "smollm2-135m", str(target)]) == 0
    capfd.readouterr()
    answers = []
    for name in ("smollm2-135m", str(target)):
        asked = ["--prompt", "The capital of France is", "--max-new-tokens", "8"]
        assert main(["generate", name, *asked]) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] and "Paris" in answers[0]


def test_packed_tensors_are_written_unpacked_and_the_config_says_so(tmp_path: Path) -> None:
    packed, target = tmp_path / "packed", tmp_path / "converted"
    packed.mkdir()
    write_packed(tiny(), packed)
    byte_source(96).save(packed)
    assert main(["convert", str(packed), str(target)]) == 0
    assert opened(packed).quantization == "mxfp4" and opened(target).quantization is None
    assert_equal(params_of(target, 2), params_of(packed, 2))


def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys
) -> None:
    def refused(source: Path | str, target: Path, *flags: str) -> str:
        assert main(["convert", str(source), str(target), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, captured.err
        return captured.err

    new = tmp_path / "new"
    assert f"{model} already holds files; name a new folder" in refused(model, model)
    assert "Not a directory; name a new folder" in refused(model, model / "config.json")
    assert "no such file or folder" in refused(tmp_path / "nowhere", new)
    shape = Path(__file__).parent.parent / "configs" / "smollm2-135m.json"
    assert "shape without weights" in refused(shape, new)
    assert "--tokenizer-path" in refused(model, new, "--tokenizer-path", str(tmp_path / "none"))
    assert "unknown option --dtypo" in refused(model, new, "--dtypo", "x")
    assert main(["convert", str(model), str(tmp_path / "made")]) == 0
    capsys.readouterr()
    assert "is an Orbax checkpoint already" in refused(tmp_path / "made", new)
    state = load_file(model / "model.safetensors")
    wrong = state | {"model.norm.weight": torch.ones(3)}
    packed = state | {"model.norm.weight": state["model.norm.weight"].to(torch.int8)}
    lacking = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    biased = state | {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}
    for tensors, message in (
        (wrong, "model.norm.weight has shape (3,), the model needs (32,)"),
        (packed, "model.norm.weight is int8"),  # found while writing
        (lacking, "lm_head.weight is missing"),
        (biased, "q_proj.bias would be ignored"),
    ):
        save_file(tensors, model / "model.safetensors")
        assert message in refused(model, new)
    save_file(state, model / "model.safetensors")
    (model / "tokenizer.json").unlink()
    assert "no tokenizer found" in refused(model, new)
    (model / "config.json").write_text('{"architectures": ["Foo"]}')
    assert "Foo is not supported" in refused(model, new)
    assert not new.exists()


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="file/under: Not a directory; name a new"):
        save_tensors(tmp_path / "file" / "under", {"w": lambda: np.ones(1)}, {})
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match="model/new cannot be written: .*No space left"):
        save_tensors(tmp_path / "model" / "new", {"w": lambda: np.ones(1)}, {})
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    save_tensors(tmp_path / "empty", {"w": lambda: np.ones(1)}, {})
    assert OrbaxSource(tmp_path / "empty").read("w") == 1


def test_tensors_are_made_as_they_are_written_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    most = 0

    def read(number: int) -> np.ndarray:
        nonlocal most
        tensor = np.full((64, 64), number, np.float32)
        alive.add(number)
        weakref.finalize(tensor, alive.discard, number)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(orbax, "_BATCH_BYTES", 3 * 64 * 64 * 4)
    names = {f"t{i:02}": i for i in range(20)}
    save_tensors(tmp_path / "m", {n: functools.partial(read, i) for n, i in names.items()}, {})
    assert 3 <= most <= 2 * 3, f"{most} of 20 at a time"
    source = OrbaxSource(tmp_path / "m")
    assert {name: source.read(name).max() for name in source.names()} == names


@pytest.fixture(scope="module")
def opens() -> list[str]:
    """The files that Python code opens from here on."""
    found: list[str] = []
    sys.addaudithook(lambda event, args: found.append(str(args[0])) if event == "open" else None)
    return found


def test_metadata_is_read_once_however_many_tensors_there_are(
    tmp_path: Path, opens: list[str]
) -> None:
    reads = []
    for count in (3, 60):
        folder = tmp_path / str(count)
        made = {f"layers.{i}.w": functools.partial(np.full, 2, i) for i in range(count)}
        save_tensors(folder, made, {})
        opens.clear()
        source = OrbaxSource(folder)
        assert {name: source.read(name)[0] for name in source.names()} == {
            f"layers.{i}.w": i for i in range(count)
        }
        reads.append(sum(name.endswith("_METADATA") for name in opens))
    assert reads == [1, 1]


def leaves() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    yield "a.weight", rng.normal(size=(64, 64)).astype(np.float32)
    yield "b.weight", rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16)
    yield "zero.weight", np.zeros((8, 4), np.float32)


def write_orbax(folder: Path, tree: Mapping[str, Any], **options: Any) -> OrbaxSource:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder / "orbax", args=ocp.args.PyTreeSave(dict(tree)))
    return OrbaxSource(folder)


@pytest.mark.parametrize("database", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_every_layout_that_orbax_writes_is_read(
    tmp_path: Path, database: bool, zarr3: bool, nested: bool
) -> None:
    want = dict(leaves())
    tree: dict[str, Any] = {}
    for name, tensor in want.items():
        first, last = name.split(".")
        tree |= {first: {last: tensor}} if nested else {name: tensor}
    source = write_orbax(tmp_path, tree, use_ocdbt=database, use_zarr3=zarr3)
    assert list(source.names()) == sorted(want)
    for name, tensor in want.items():
        assert source.shape(name) == tensor.shape
        found = source.read(name)
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found, tensor)


def test_an_array_that_is_gone_or_cut_is_named(tmp_path: Path) -> None:
    source = write_orbax(tmp_path / "files", dict(leaves()), use_ocdbt=False)
    (tmp_path / "files" / "orbax" / "a.weight" / "0.0").unlink()
    with pytest.raises(WeightError, match=r"files/orbax: tensor a.weight cannot be read: "):
        source.read("a.weight")
    assert source.read("b.weight").any() and not source.read("zero.weight").any()
    write_orbax(tmp_path / "database", dict(leaves()))
    for file in (tmp_path / "database" / "orbax").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"database/orbax: ") as caught:
        OrbaxSource(tmp_path / "database").read("b.weight")
    assert "tensorstore_spec" not in str(caught.value)
    (tmp_path / "database" / "orbax" / "_METADATA").write_text("{")
    with pytest.raises(WeightError, match="not a whole Orbax checkpoint"):
        OrbaxSource(tmp_path / "database")
