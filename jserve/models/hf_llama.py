"""What Hugging Face configs of Llama and its relatives say beyond the common settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jserve.models.hf_values import count, count_or_none, flag, from_zero, layer_kinds
from jserve.types import ModelConfig

MISTRAL_DEFAULTS: Mapping[str, Any] = {"sliding_window": 4096}


def adapt_llama(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return dataclasses.replace(
        config, qkv_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias")
    )


def adapt_mistral(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    window = count_or_none(hf, "sliding_window")
    return dataclasses.replace(config, windows=(window,) * config.num_layers)


def adapt_qwen2(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    return dataclasses.replace(config, qkv_bias=True, windows=_late_windows(config, hf))


def adapt_qwen3(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        windows=_late_windows(config, hf),
    )


def _late_windows(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """From layer max_window_layers on, or as layer_types says."""
    first = from_zero(hf, "max_window_layers", 28)
    usual = [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config.num_layers)
    ]
    return qwen_windows(hf, layer_kinds(hf, usual))


def qwen_windows(hf: Mapping[str, Any], kinds: Iterable[str]) -> tuple[int | None, ...]:
    """Of layers of these kinds; only with use_sliding_window."""
    window = used_window(hf)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def used_window(hf: Mapping[str, Any]) -> int | None:
    """None without use_sliding_window."""
    window = count(hf, "sliding_window", 4096)
    return window if flag(hf, "use_sliding_window") else None
