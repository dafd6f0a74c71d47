"""What Hugging Face configs of Llama and its relatives say beyond the common settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jserve.types import ModelConfig

MISTRAL_DEFAULTS: Mapping[str, Any] = {"sliding_window": 4096}


def adapt_llama(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return dataclasses.replace(
        config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(hf.get("mlp_bias"))
    )


def adapt_mistral(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    return dataclasses.replace(config, windows=(hf.get("sliding_window"),) * config.num_layers)


def adapt_qwen2(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    return dataclasses.replace(config, qkv_bias=True, windows=_late_windows(config, hf))


def adapt_qwen3(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        windows=_late_windows(config, hf),
    )


def _late_windows(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """From layer max_window_layers on, or as layer_types says."""
    first = hf.get("max_window_layers", 28)
    usual = [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config.num_layers)
    ]
    return qwen_windows(hf, hf.get("layer_types") or usual)


def qwen_windows(hf: Mapping[str, Any], kinds: Iterable[str]) -> tuple[int | None, ...]:
    """Of layers of these kinds; only with use_sliding_window."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
