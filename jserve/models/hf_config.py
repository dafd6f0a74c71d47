"""Reads what all families share from a Hugging Face config dict (config.json or one derived from
GGUF metadata).

Knows both spellings of rope settings: `rope_parameters` of transformers 5, and rope_theta with
rope_scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models.hf_values import count, flag, number, number_or_none, section, text, token_ids
from jserve.models.rope_scaling import SCALINGS
from jserve.types import ModelConfig, RopeConfig

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")

#: What a way of stretching the context needs, and what it also knows.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL = (
    *("original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
_LONGEST = 2**31 - 1  # tokens: positions are int32


def common_config(
    architecture: str, hf: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """The fields that mean the same in every family; raises ConfigError naming a missing or
    unsupported one.
    """
    heads, num_layers = count(hf, "num_attention_heads"), count(hf, "num_hidden_layers")
    hidden = count(hf, "hidden_size")
    # Gemma 3's nested form is read by its family; here a single rope is the rule.
    settings = rope_settings(hf)
    nested = "full_attention" in settings
    rope = rope_config(hf, {} if nested else settings, theta=number(hf, "rope_theta", 10_000.0))
    begins = (*token_ids(hf, "bos_token_id"), *token_ids(generation, "bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        model_type=text(hf, "model_type"),
        vocab_size=count(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", hidden // heads),
        rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
        max_position=_max_position(hf, rope),
        rope=rope,
        windows=(None,) * num_layers,
        tie_embeddings=flag(hf, "tie_word_embeddings"),
        activation=_activation(hf),
        dtype=_dtype(hf),
        eos_token_ids=eos_token_ids(hf, generation),
        bos_token_id=next(iter(begins), None),
    )


def rope_settings(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """In either spelling."""
    return section(hf, "rope_parameters") or section(hf, "rope_scaling")


def rope_config(hf: Mapping[str, Any], settings: Mapping[str, Any], *, theta: float) -> RopeConfig:
    """One rope from its settings dict; `theta` holds where the settings name none."""
    scaling = text(settings, "rope_type") or text(settings, "type") or "default"
    partial = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported, only 1")
    theta = number(settings, "rope_theta", theta)
    if theta <= 1:
        raise ConfigError(f"the model's config: rope_theta must be over 1, is {theta}")
    if scaling == "default":
        return RopeConfig(theta)
    if scaling not in SCALINGS:
        raise ConfigError(
            f"rope scaling {scaling!r} is not supported; known: default, {', '.join(SCALINGS)}"
        )
    needed = _NEEDED[scaling]
    found = {key: number_or_none(settings, key) for key in (*needed, *_OPTIONAL)}
    numbers = {key: float(value) for key, value in found.items() if value is not None}
    for key in needed:
        if key not in numbers:
            raise ConfigError(f"rope scaling {scaling!r} needs {key!r} in the model's config")
    if scaling == "yarn":
        numbers["truncate"] = float(flag(settings, "truncate", True))
    if scaling != "linear":
        length = count(hf, "max_position_embeddings")
        numbers.setdefault("original_max_position_embeddings", float(length))
    if scaling == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        rule = "high_freq_factor must be over low_freq_factor"
        raise ConfigError(f"the model's config: {rule}, is {numbers['high_freq_factor']}")
    return RopeConfig(theta, scaling, tuple(sorted(numbers.items())))


def _max_position(hf: Mapping[str, Any], rope: RopeConfig) -> int:
    """YaRN is switched on by its settings alone, the config's own length staying the trained one;
    so take the larger.
    """
    length = count(hf, "max_position_embeddings")
    if rope.scaling != "yarn":
        return length
    numbers = dict(rope.params)
    stretched = int(numbers["factor"] * numbers["original_max_position_embeddings"])
    if stretched > _LONGEST:
        rule = "factor times original_max_position_embeddings must be"
        raise ConfigError(f"the model's config: {rule} at most {_LONGEST}, is {stretched}")
    return max(length, stretched)


def _activation(hf: Mapping[str, Any]) -> str:
    name = text(hf, "hidden_activation") or text(hf, "hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(hf: Mapping[str, Any]) -> str:
    name = text(hf, "dtype") or text(hf, "torch_dtype") or "float32"
    name = name.removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def check_token_ids(generation: Mapping[str, Any]) -> None:
    """Of a generation_config; raises ConfigError."""
    for key in ("bos_token_id", "eos_token_id"):
        token_ids(generation, key)


def eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Any id that one of the files calls the end."""
    ids = {one for source in configs for one in token_ids(source, "eos_token_id")}
    return tuple(sorted(ids))
