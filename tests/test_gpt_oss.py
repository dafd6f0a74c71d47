"""gpt-oss against transformers on tiny random models: sinks, bounded activations, experts packed as
MXFP4, and what is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
from tiny_models import (
    PAGE,
    Served,
    assert_close,
    hf_dict,
    oracle,
    oracle_logits,
    random_tables,
    rules_of,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jserve.errors import ConfigError, WeightError
from jserve.models.registry import build_model, parse_config
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.loader import load_params
from jserve.weights.orbax import take_apart
from sharding.rules import Rules

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
TINY = {
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "rope_parameters": YARN,
}
#: Sizes of tensor and expert; 6 devices pad the heads, and their sinks.
MESHES = (
    (2, 1),
    *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((1, 1), (8, 1), (1, 2), (2, 3))),
)


@dataclasses.dataclass(frozen=True)
class Source:
    model_path: str
    revision: str | None = None
    load_format: str = "auto"


def tiny(**overrides) -> torch.nn.Module:
    """Sinks as large as scores, and gates and ups that are bounded."""
    model = oracle("GptOssConfig", **{**TINY, **overrides})
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("sinks"):
                tensor.mul_(10)
            if name.endswith("gate_up_proj"):
                tensor.mul_(15)
    return model


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 96, length).tolist()


@pytest.mark.parametrize(("tp", "ep"), MESHES)
def test_logits_equal_transformers_in_chunks_and_in_decode(tp: int, ep: int) -> None:
    theirs = tiny(num_attention_heads=8, num_key_value_heads=4)
    ours, ids = Served.of(theirs, tp, ep=ep), prompt_of(30)
    expected, tables = oracle_logits(theirs, ids), random_tables(2)
    logits = ours.step([(0, ids[:9])], tables, bucket=(12, 4))
    assert_close(logits, expected[:9])
    logits = ours.step([(9, ids[9:20]), (0, ids[:1])], tables, bucket=(12, 4))
    assert_close(logits, np.concatenate([expected[9:20], expected[:1]]))
    for position in (20, 21):
        rows = [(position, [ids[position]]), (position - 19, [ids[position - 19]])]
        logits = ours.step(rows, tables, decode=True, bucket=(4, 4))
        assert_close(logits, expected[[position, position - 19]])


def test_sinks_and_bounds_change_the_logits_that_are_compared() -> None:
    theirs, ids = tiny(), prompt_of(20)
    expected = oracle_logits(theirs, ids)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 1e9
    unbounded = oracle_logits(theirs, ids)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 7.0
        layer.self_attn.sinks.data.fill_(-1e9)
    sinkless = oracle_logits(theirs, ids)
    for other in (unbounded, sinkless):
        assert np.abs(other - expected).max() / np.abs(expected).max() > 0.01


def write_packed(model: torch.nn.Module, folder: Path) -> None:
    """A checkpoint as released: experts of random MXFP4, which `model` is given too."""
    rng = np.random.default_rng(0)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3], dtype=np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        whole = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        model.get_parameter(name).data.copy_(whole)
    config = {**hf_dict(model), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    half = len(tensors) // 2  # some blocks and their scales are in two files
    for index, names in enumerate((sorted(tensors)[:half], sorted(tensors)[half:])):
        part = {name: np.ascontiguousarray(tensors[name]) for name in names}
        safetensors.numpy.save_file(part, folder / f"model-{index}.safetensors")


def test_a_packed_checkpoint_loads_as_transformers_unpacks_it(tmp_path: Path) -> None:
    theirs = tiny()
    write_packed(theirs, tmp_path)
    checkpoint = open_checkpoint(Source(str(tmp_path)))
    assert checkpoint.quantization == "mxfp4"
    ours = Served.of(theirs, tp=2)
    loaded = load_params(
        ours.model.specs, checkpoint, ours.rules, "float32", progress=lambda done, total: None
    )
    for path, expected in ours.params.items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), np.asarray(expected), path)


def test_saving_takes_gate_and_up_apart_again() -> None:
    theirs = tiny(num_hidden_layers=1)
    ours = Served.of(theirs, tp=2)
    for spec in ours.model.specs:
        for name, tensor in take_apart(spec, np.asarray(ours.params[spec.path])).items():
            np.testing.assert_array_equal(tensor, theirs.state_dict()[name].numpy())


def test_the_released_shape_is_read() -> None:
    hf = json.loads(Path("configs/gpt-oss-20b.json").read_text())
    config = parse_config(hf)
    assert config.windows == (128, None) * 12 and config.attention_sinks
    assert config.qkv_bias and config.output_bias and not config.mlp_bias
    assert config.moe is not None and (config.moe.num_experts, config.moe.top_k) == (32, 4)
    assert (config.dtype, config.max_position) == ("bfloat16", 131_072)
    model = build_model(config, rules_of(), dtype="bfloat16", attention_backend=None, page_size=16)
    size = sum(int(np.prod(spec.shape)) for spec in model.specs)
    assert 20.9e9 < size < 21.0e9
    bare = {key: hf[key] for key in ("architectures", "num_hidden_layers", "vocab_size")}
    sizes = {key: hf[key] for key in hf if key.startswith(("hidden_size", "intermediate", "num_"))}
    assert parse_config({**bare, **sizes}).rope == config.rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported, only 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"sliding_window": "many"}, "sliding_window must be a positive integer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' .* GptOss.*, only mxfp4"),
        ({"quantization_config": "mxfp4"}, "quantization_config must be an object"),
        ({"architectures": ["LlamaForCausalLM"]}, "'mxfp4' is not supported for LlamaFor"),
    ],
)
def test_what_it_cannot_serve_is_named(change: dict, message: str) -> None:
    hf = json.loads(Path("configs/gpt-oss-20b.json").read_text())
    with pytest.raises(ConfigError, match=message):
        parse_config({**hf, **change})


def test_a_gpus_kernels_take_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tiny(head_dim=16)
    ours = Served.of(theirs)
    arguments = ours.arguments([(0, prompt_of(5))], random_tables(1))
    monkeypatch.setattr(Rules, "platform", "gpu")
    ours.model = build_model(
        ours.model.config, ours.rules, dtype="float32", attention_backend=None, page_size=PAGE
    )
    program = str(jax.make_jaxpr(ours._program)(*arguments))
    layers = {kernel: program.count(kernel) for kernel in ("write_qkv", "ragged_prefill")}
    assert all(count >= 2 for count in layers.values()), f"{layers=}"


def test_a_tpu_is_refused_by_the_name_of_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(hf_dict(tiny()))
    monkeypatch.setattr(Rules, "platform", "tpu")
    with pytest.raises(ConfigError, match="GptOssForCausalLM has attention sinks, .* TPU"):
        build_model(config, rules_of(), dtype="float32", attention_backend=None, page_size=PAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_scales": None}, "x_scales is missing, x_blocks needs it"),
        ({"x_scales": np.zeros((2, 3, 4), np.uint8)}, r"x_scales is uint8 \(2, 3, 4\), MXFP4"),
        ({"x_scales": np.zeros((2, 3, 1), np.float32)}, "x_scales is float32"),
        ({"x_blocks": np.zeros((2, 3, 1, 8), np.uint8)}, "x_blocks has blocks of 8 bytes"),
        ({"x_blocks": np.zeros((2, 3, 16), np.uint8)}, "x_blocks is uint8"),
    ],
)
def test_packed_tensors_of_another_form_are_named(
    tmp_path: Path, change: dict, message: str
) -> None:
    parts = {"x_blocks": np.zeros((2, 3, 1, 16), np.uint8), "x_scales": np.zeros((2, 3, 1), "u1")}
    parts = {name: tensor for name, tensor in {**parts, **change}.items() if tensor is not None}
    with pytest.raises(WeightError, match=message):
        packed_source(tmp_path, parts)


def test_every_number_and_every_scale_is_unpacked_exactly(tmp_path: Path) -> None:
    scales = np.arange(256, dtype=np.uint8).reshape(2, 128, 1)
    blocks = np.arange(16, dtype=np.uint8) * 16 + np.arange(16, dtype=np.uint8)[::-1]
    parts = {
        "x_blocks": np.broadcast_to(blocks, (2, 128, 1, 16)).copy(),
        "x_scales": scales,
        "x_bias": np.ones((2, 128), np.float32),
    }
    source = packed_source(tmp_path, parts)
    assert sorted(source.names()) == ["x", "x_bias"] and source.shape("x") == (2, 32, 128)
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers += [-x for x in numbers]
    codes = [code for byte in blocks.tolist() for code in (byte % 16, byte // 16)]
    whole = source.read("x")
    assert whole.shape == source.shape("x") and whole.dtype == jax.numpy.bfloat16
    for scale in range(256):
        found = whole[scale // 128, :, scale % 128].astype(np.float64)
        expected = np.array([numbers[code] for code in codes]) * 2.0 ** (scale - 127)
        if scale == 255:
            assert np.isnan(found).all()
        else:
            expected[np.abs(expected) >= 2.0**128] *= np.inf
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(source.read("x_bias"), parts["x_bias"])


def packed_source(folder: Path, parts: dict[str, np.ndarray]):
    safetensors.numpy.save_file(parts, folder / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(Source(str(folder))).tensors()
