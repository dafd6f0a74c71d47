"""GGUF files: types, names, layouts and the config that their metadata stands for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import constants, quants

from jserve.errors import ConfigError, WeightError
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.gguf import GGUFSource, read_header
from jserve.weights.gguf_config import eos_token_ids, hf_config, llama3_scaling
from jserve.weights.loader import load_params
from jserve.weights.spec import Piece, WeightSpec
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 4, 2, 8, 64
PLAIN = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Source:
    model_path: str
    revision: str | None = None
    load_format: str = "auto"


def dequantizable() -> list[str]:
    """Every type for which the gguf package has a dequantizer."""
    names = []
    for kind in constants.GGMLQuantizationType:
        _, num_bytes = constants.GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, constants.GGMLQuantizationType]] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (metadata or {}).items():
        adders = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        adders.get(type(value), writer.add_uint32)(key, value)
    if "token_embd.weight" not in tensors:
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order: within a head, row i of the first half is followed by row i of the
    second.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("name", dequantizable())
def test_every_type_that_gguf_dequantizes_is_read(tmp_path: Path, name: str) -> None:
    kind = constants.GGMLQuantizationType[name]
    block, num_bytes = constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    columns = max(block, 32)
    data = rng.integers(0, 256, (6, columns // block * num_bytes), np.uint8)
    path = write(tmp_path / "m.gguf", {}, raw={"blk.0.ffn_up.weight": (data, kind)})
    source = GGUFSource(read_header(path))
    up = "model.layers.0.mlp.up_proj.weight"
    assert source.shape(up) == (6, columns)
    with np.errstate(all="ignore"):  # random bytes hold NaN and infinity too
        values = source.read(up)
        want = quants.dequantize(data, kind)
    assert (values.dtype == np.float32) or name in PLAIN
    np.testing.assert_array_equal(values.astype(np.float32), want)


def test_the_types_cover_the_quantizations_in_use() -> None:
    common = {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    }
    assert common | set(PLAIN) <= set(dequantizable())


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_llama_query_and_key_rows_get_their_hugging_face_order(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    query = rng.normal(size=(HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    key = rng.normal(size=(KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    bias = rng.normal(size=KV_HEADS * HEAD_DIM).astype(np.float32)
    type_ = constants.GGMLQuantizationType[kind]
    stored = {
        "blk.0.attn_q.weight": (quants.quantize(permuted(query, HEADS), type_), type_),
        "blk.0.attn_k.weight": (quants.quantize(permuted(key, KV_HEADS), type_), type_),
        "blk.0.attn_v.weight": (quants.quantize(key, type_), type_),
    }
    path = write(tmp_path / "m.gguf", {"blk.0.attn_k.bias": permuted(bias, KV_HEADS)}, raw=stored)
    source = GGUFSource(read_header(path))

    def read(name: str) -> np.ndarray:
        return source.read(f"model.layers.0.self_attn.{name}")

    def rounded(weight: np.ndarray) -> np.ndarray:
        return quants.dequantize(quants.quantize(weight, type_), type_)

    np.testing.assert_array_equal(read("q_proj.weight"), rounded(query))
    np.testing.assert_array_equal(read("k_proj.weight"), rounded(key))
    np.testing.assert_array_equal(read("k_proj.bias"), bias)
    np.testing.assert_array_equal(read("v_proj.weight"), rounded(key))


def test_qwen_rows_stay_and_biases_and_head_norms_are_named(tmp_path: Path) -> None:
    query = np.arange(HEADS * HEAD_DIM * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN)
    tensors = {
        "blk.0.attn_q.weight": query,
        "blk.0.attn_q.bias": np.ones(HIDDEN, np.float32),
        "blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32),
        "output.weight": np.ones((VOCAB, HIDDEN), np.float32),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
        "blk.0.ffn_norm.weight": np.ones(HIDDEN, np.float32),
    }
    source = GGUFSource(read_header(write(tmp_path / "m.gguf", tensors, architecture="qwen3")))
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight"), query)
    assert source.names() == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "lm_head.weight",
        "model.norm.weight",
    }


def test_gemma_norms_lose_the_one_that_the_file_folds_in(tmp_path: Path) -> None:
    folded = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
    names = {
        "blk.0.attn_norm.weight": "input_layernorm",
        "blk.0.post_attention_norm.weight": "post_attention_layernorm",
        "blk.0.ffn_norm.weight": "pre_feedforward_layernorm",
        "blk.0.post_ffw_norm.weight": "post_feedforward_layernorm",
        "blk.0.attn_q_norm.weight": "self_attn.q_norm",
        "blk.0.attn_k_norm.weight": "self_attn.k_norm",
    }
    tensors = {**dict.fromkeys(names, folded), "output_norm.weight": folded}
    tensors["blk.0.ffn_up.weight"] = np.ones((48, HIDDEN), np.float32)
    metadata = {"gemma3.attention.sliding_window": 16, "gemma3.attention.key_length": 16}
    path = write(tmp_path / "m.gguf", tensors, architecture="gemma3", metadata=metadata)
    header = read_header(path)
    source = GGUFSource(header)
    for name in names.values():
        np.testing.assert_allclose(source.read(f"model.layers.0.{name}.weight"), folded - 1)
    np.testing.assert_allclose(source.read("model.norm.weight"), folded - 1)
    np.testing.assert_array_equal(
        source.read("model.layers.0.mlp.up_proj.weight"), tensors["blk.0.ffn_up.weight"]
    )
    config = hf_config(header)
    assert config["model_type"] == "gemma3_text"
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (
        16,
        16,
        16,
    )
    assert (config["rope_local_base_freq"], config["layer_types"]) == (
        10000.0,
        ["sliding_attention"],
    )
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    metadata = {
        "qwen2.rope.freq_base": 1e6,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tensors = {
        "blk.0.attn_q.bias": np.ones(HIDDEN, np.float32),
        "output.weight": np.ones((VOCAB, HIDDEN), np.float32),
    }
    config = hf_config(
        read_header(write(tmp_path / "m.gguf", tensors, architecture="qwen2", metadata=metadata))
    )
    expected = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": [2],
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_a_window_makes_a_llama_file_mistral(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, metadata={"llama.attention.sliding_window": 64})
    config = hf_config(read_header(path))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)
    assert config["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_an_attention_factor_of_yarn_multiplies_what_yarn_gives(tmp_path: Path, key: str) -> None:
    metadata = {"type": "yarn", "factor": 4.0, "original_context_length": 32, key: 0.5}
    metadata = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    config = hf_config(read_header(write(tmp_path / "m.gguf", {}, metadata=metadata)))
    assert config["rope_scaling"]["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_experts_in_a_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, metadata={"llama.expert_count": 8})
    with pytest.raises(ConfigError, match="experts are not read from GGUF"):
        open_checkpoint(Source(str(path)))


def test_an_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ConfigError, match="'longrope' is not supported"):
        open_checkpoint(Source(str(path)))


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama3_rope_scaling_is_recovered_from_its_divisors(factor: float, head_dim: int) -> None:
    low, high, original, theta = 1.0, 4.0, 8192, 500000.0
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    assert llama3_scaling(divisors, theta, head_dim) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    with pytest.raises(ConfigError, match="not a Llama 3 rope scaling"):
        llama3_scaling(divisors[::-1], theta, head_dim)


def test_the_divisors_in_a_file_reach_the_config(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is not a Llama 3"):
        open_checkpoint(Source(str(path)))
    assert "rope_freqs.weight" not in GGUFSource(read_header(path)).names()


def test_end_tokens_come_from_ids_and_from_names() -> None:
    prefix = "tokenizer.ggml."
    named = {
        prefix + "tokens": ["a", "<end_of_turn>", "<|im_end|>"],
        prefix + "token_type": [1, 3, 1],
    }
    assert eos_token_ids({prefix + "eos_token_id": 0, **named}) == [0, 1]
    assert eos_token_ids({prefix + "eos_token_id": 0, prefix + "eot_token_id": 5, **named}) == [
        0,
        5,
    ]


@pytest.mark.parametrize("keep", [10, 300, -8])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "m.gguf", {"output_norm.weight": np.ones(HIDDEN, np.float32)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"m.gguf: truncated") as caught:
        open_checkpoint(Source(str(path)))
    if keep < 0:
        assert "tensor output_norm.weight ends at byte" in str(caught.value)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not gguf at all, but long enough")
    with pytest.raises(ConfigError, match="not a little-endian GGUF"):
        open_checkpoint(Source(str(path)))
    bert = write(tmp_path / "bert.gguf", {}, architecture="bert")
    with pytest.raises(ConfigError, match="architecture 'bert' is not supported; known: llama"):
        open_checkpoint(Source(str(bert)))
    with pytest.raises(ConfigError, match="no such file"):
        open_checkpoint(Source(str(tmp_path / "gone.gguf")))


def test_a_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    write(
        parts[0], {"output_norm.weight": np.ones(HIDDEN, np.float32)}, metadata={"split.count": 2}
    )
    write(
        parts[1],
        {"blk.0.attn_norm.weight": np.full(HIDDEN, 2, np.float32)},
        metadata={"split.count": 2},
    )
    source = open_checkpoint(Source(str(tmp_path))).tensors()
    np.testing.assert_array_equal(source.read("model.norm.weight"), np.ones(HIDDEN))
    np.testing.assert_array_equal(
        source.read("model.layers.0.input_layernorm.weight"), np.full(HIDDEN, 2)
    )
    assert source.file("model.layers.0.input_layernorm.weight") == parts[1]
    with pytest.raises(ConfigError, match="pass the first"):
        open_checkpoint(Source(str(parts[1])))
    parts[1].unlink()
    with pytest.raises(WeightError, match=r"00002-of-00002.gguf: no such file"):
        open_checkpoint(Source(str(parts[0])))


def test_a_gguf_fills_sharded_parameters(tmp_path: Path) -> None:
    weight = np.arange(48 * HIDDEN, dtype=np.float32).reshape(48, HIDDEN)
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": weight})

    def place(target: np.ndarray, tensor: np.ndarray) -> None:
        target[...] = tensor.T

    piece = Piece("model.layers.0.mlp.up_proj.weight", (48, HIDDEN), place)
    spec = WeightSpec("up", (HIDDEN, 48), "float32", (None, "mlp"), (piece,))
    rules = Rules(make_mesh(jax.devices(), tensor=2), TP)
    checkpoint = open_checkpoint(Source(str(path)))
    params = load_params([spec], checkpoint, rules, "float32", progress=lambda done, total: None)
    np.testing.assert_array_equal(params["up"], weight.T)
    assert [s.data.shape for s in params["up"].addressable_shards] == [(HIDDEN, 24)] * 2


def test_the_built_in_model_has_the_reference_config() -> None:
    checkpoint = open_checkpoint(Source("smollm2-135m"))
    golden = json.loads((Path(__file__).parent / "data" / "smollm2-135m.json").read_text())["meta"]
    assert (checkpoint.kind, checkpoint.path.name) == ("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
    reference = golden["config"]
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    same += (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    assert {k: checkpoint.hf_config[k] for k in same} == {k: reference[k] for k in same}
    assert checkpoint.hf_config["rope_theta"] == reference["rope_parameters"]["rope_theta"]
    assert checkpoint.hf_config["eos_token_id"] == [golden["eos_token_id"]]
    source = checkpoint.tensors()
    assert len(source.names()) == 272
    assert source.read("model.layers.0.self_attn.k_proj.weight").shape == (192, 576)
