"""Reads what all families share from a Hugging Face config dict (config.json or one derived from
GGUF metadata).

Knows both spellings of rope settings: `rope_parameters` of transformers 5, and rope_theta with
rope_scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models.rope_scaling import SCALINGS
from jserve.types import ModelConfig, RopeConfig

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")


def common_config(
    architecture: str, hf: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """The fields that mean the same in every family; raises ConfigError naming a missing or
    unsupported one.
    """
    heads, num_layers = count(hf, "num_attention_heads"), count(hf, "num_hidden_layers")
    hidden = count(hf, "hidden_size")
    # Gemma 3's nested form is read by its family; here a single rope is the rule.
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"the model's config: rope settings must be an object, are {settings!r}")
    nested = "full_attention" in settings
    rope = rope_config(hf, {} if nested else settings, theta=number(hf, "rope_theta", 10_000.0))
    return ModelConfig(
        architecture=architecture,
        model_type=hf.get("model_type", ""),
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
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        activation=_activation(hf),
        dtype=_dtype(hf),
        eos_token_ids=eos_token_ids(hf, generation),
        bos_token_id=hf.get("bos_token_id", generation.get("bos_token_id")),
    )


def rope_config(hf: Mapping[str, Any], settings: Mapping[str, Any], *, theta: float) -> RopeConfig:
    """One rope from its settings dict; `theta` holds where the settings name none."""
    scaling = settings.get("rope_type") or settings.get("type") or "default"
    partial = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported, only 1")
    theta = float(settings.get("rope_theta") or theta)
    if scaling == "default":
        return RopeConfig(theta)
    if scaling not in SCALINGS:
        raise ConfigError(
            f"rope scaling {scaling!r} is not supported; known: default, {', '.join(SCALINGS)}"
        )
    numbers = {
        key: float(value) for key, value in settings.items() if isinstance(value, int | float)
    }
    numbers.pop("rope_theta", None)
    if scaling != "linear":
        numbers.setdefault(
            "original_max_position_embeddings", float(_need(hf, "max_position_embeddings"))
        )
    wanted = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in wanted.get(scaling, ("factor",)):
        if key not in numbers:
            raise ConfigError(f"rope scaling {scaling!r} needs {key!r} in the model's config")
    return RopeConfig(theta, scaling, tuple(sorted(numbers.items())))


def _need(hf: Mapping[str, Any], key: str) -> Any:
    value = hf.get(key)
    if value is None:
        raise ConfigError(f"the model's config lacks {key!r}")
    return value


def count(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the config; without a default it must be there."""
    value = _need(hf, key) if default is None else hf.get(key) or default
    if type(value) is not int or value < 1:
        raise ConfigError(f"the model's config: {key} must be a positive integer, is {value!r}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """A number of the config; `default` also in place of null and of 0."""
    value = hf.get(key) or default
    if type(value) not in (int, float):
        raise ConfigError(f"the model's config: {key} must be a number, is {value!r}")
    return value


def _max_position(hf: Mapping[str, Any], rope: RopeConfig) -> int:
    """YaRN is switched on by its settings alone, the config's own length staying the trained one;
    so take the larger.
    """
    length = count(hf, "max_position_embeddings")
    if rope.scaling != "yarn":
        return length
    numbers = dict(rope.params)
    return max(length, int(numbers["factor"] * numbers["original_max_position_embeddings"]))


def _activation(hf: Mapping[str, Any]) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(hf: Mapping[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Any id that one of the files calls the end."""
    ids: set[int] = set()
    for source in configs:
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    if wrong := [value for value in ids if not isinstance(value, int)]:
        raise ConfigError(f"the model's config: eos_token_id must be token ids, is {wrong[0]!r}")
    return tuple(sorted(ids))
