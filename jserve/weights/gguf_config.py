"""GGUF metadata → the Hugging Face config.json that the same model would have.

Owns the correspondence of keys, and what GGUF leaves implicit (tied embeddings, Llama 3's rope
scaling, Gemma 3's layer pattern). It knows nothing of tensors' contents except the one that encodes
a rope scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jserve.errors import ConfigError, WeightError
from jserve.weights.gguf import GGUFHeader

_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_GEMMA3_27B_BLOCKS = 62  # the one size whose attention scale is not head_dim ** -0.5
#: Tokens that end an assistant's turn; used when the metadata names no `eot_token_id`.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_CONTROL_TOKEN = 3


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """The equivalent config.json. Raises ConfigError naming a metadata key that is missing, or the
    embedding.
    """
    metadata = header.metadata
    name: str = metadata["general.architecture"]
    if _EMBEDDING not in header.tensors:
        raise WeightError(f"GGUF file without a model: tensor {_EMBEDDING} is missing")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise ConfigError(f"GGUF metadata lacks {name}.{key}")
        return value

    if metadata.get(f"{name}.expert_count"):
        raise ConfigError("experts are not read from GGUF: use the model's safetensors")
    hidden, num_heads = get("embedding_length"), get("attention.head_count")
    architecture, model_type = _ARCHITECTURES[name]
    head_dim = get("attention.key_length", get("rope.dimension_count", hidden // num_heads))
    theta = float(get("rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": header.tensors[_EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": _dtype(header),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(metadata),
    }
    if name == "gemma3":
        config |= _gemma3(config, get("attention.sliding_window"), metadata)
    elif f"{name}.attention.sliding_window" in metadata:
        config |= {"sliding_window": get("attention.sliding_window"), "use_sliding_window": True}
        if name == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: eos, end of turn, end of message."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    ids = [metadata[key] for key in keys if key in metadata]
    if "tokenizer.ggml.eot_token_id" not in metadata:
        types = metadata.get("tokenizer.ggml.token_type", ())
        tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
        wanted = frozenset(_END_OF_TURN)
        ids += [
            i
            for i, t in enumerate(tokens)
            if t in wanted and i < len(types) and types[i] == _CONTROL_TOKEN
        ]
    return list(dict.fromkeys(ids))


def _gemma3(config: Mapping[str, Any], window: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    period = int(metadata.get("gemma3.attention.sliding_window_pattern", 6))
    is_27b = layers == _GEMMA3_27B_BLOCKS
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": period,
        "layer_types": [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ],
        "rope_local_base_freq": float(metadata.get("gemma3.rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "attn_logit_softcapping": metadata.get("gemma3.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }


def _rope_scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any] | None:
    metadata, name = header.metadata, header.metadata["general.architecture"]
    if _ROPE_FACTORS in header.tensors:
        return llama3_scaling(_rope_factors(header), theta, head_dim)
    prefix = f"{name}.rope.scaling."
    kind = metadata.get(f"{prefix}type", "none")
    factor = metadata.get(f"{prefix}factor", metadata.get(f"{name}.rope.scale_linear", 1.0))
    if kind == "yarn":
        optional = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        extras = {
            ours: metadata[prefix + key]
            for ours, key in optional.items()
            if prefix + key in metadata
        }
        attention = [prefix + key for key in ("attn_factor", "yarn_attn_factor")]
        if any(key in metadata for key in attention):
            # here they multiply what YaRN gives attention, in config.json they stand for it
            grown = 1.0 + 0.1 * math.log(max(factor, 1.0))
            extras["attention_factor"] = grown * math.prod(metadata.get(k, 1.0) for k in attention)
        original = metadata.get(
            f"{prefix}original_context_length", metadata[f"{name}.context_length"]
        )
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **extras,
        }
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"GGUF rope scaling {kind!r} is not supported; known: none, linear, yarn, llama3"
        )
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _rope_factors(header: GGUFHeader) -> np.ndarray:
    tensor = header.tensors[_ROPE_FACTORS]
    return np.fromfile(tensor.file, np.float32, tensor.shape[0], offset=tensor.offset)


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope scaling from the divisors of its inverse frequencies, which is all that GGUF
    keeps of it.

    Between the two wavelengths of the scheme, 1/divisor is linear in 1/wavelength; the fitted line
    gives original/wavelength's two bounds up to a common scale, so low_freq_factor is set to 1, as
    published models have it. Raises ConfigError when no such scaling gives these divisors.
    """
    factors = np.asarray(factors, np.float64)
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # 1 / wavelength
    factor = float(factors.max())
    between = (factors > 1 + 1e-5) & (factors < factor * (1 - 1e-5))
    if factor > 1 and between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(frequencies[between], smooth, 1)
        high = 1 - 1 / offset
        original = slope * (high - 1)
        ramp = np.clip(slope * frequencies + offset, 0, 1)
        if np.allclose(1 / ((1 - ramp) / factor + ramp), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": round(float(high), 3),
                "original_max_position_embeddings": round(float(original)),
            }
    raise ConfigError(f"GGUF tensor {_ROPE_FACTORS} is not a Llama 3 rope scaling: {factors}")


def _dtype(header: GGUFHeader) -> str:
    """The dtype to compute in: the embedding's where it is plain, bfloat16 for quantized files."""
    kind = header.tensors[_EMBEDDING].type.name
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
