"""gpt-oss: experts in every layer, attention sinks, and a window in every second layer.

Checkpoints hold all experts of a layer as one tensor, inputs first, gate and up in alternate
columns; released ones have them packed (weights/mxfp4.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jserve.errors import ConfigError
from jserve.models.blueprint import place_as_is
from jserve.models.hf_values import count, flag, layer_kinds
from jserve.models.moe import ExpertShape, MoENames
from jserve.types import ModelConfig, MoEConfig
from jserve.weights.spec import Piece

#: What configs may leave out, with the family's own values.
DEFAULTS: Mapping[str, Any] = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}

NAMES = MoENames(router="router")

#: The activation's numbers, the only ones that layers/moe.py knows.
_ACTIVATION = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def adapt_gpt_oss(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    for key, served in _ACTIVATION.items():
        if hf.get(key, served) != served:
            raise ConfigError(
                f"the model's config: {key} {hf[key]} is not supported, only {served}"
            )
    usual = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    kinds = layer_kinds(hf, usual)
    window, biased = count(hf, "sliding_window"), flag(hf, "attention_bias")
    return dataclasses.replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        attention_sinks=True,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        moe=MoEConfig(
            num_experts=count(hf, "num_local_experts"),
            top_k=count(hf, "num_experts_per_tok"),
            width=config.intermediate_size,
            scoring="softmax_topk",
            router_bias=True,
            expert_bias=True,
            activation="swiglu_oai",
            sparse_layers=(True,) * config.num_layers,
        ),
    )


def whole_experts(part: str, name: str, names: MoENames, shape: ExpertShape) -> list[Piece]:
    """As ExpertPieces; each parameter is one tensor."""
    experts, hidden, width = shape.num_experts, shape.hidden, shape.width
    place = functools.partial(_place_alternate, shape.shards)
    return {
        "gate_up": [Piece(f"{name}.gate_up_proj", (experts, hidden, 2 * width), place)],
        "gate_up_bias": [Piece(f"{name}.gate_up_proj_bias", (experts, 2 * width), place)],
        "down": [Piece(f"{name}.{names.down}", (experts, width, hidden), place_as_is)],
        "down_bias": [Piece(f"{name}.{names.down}_bias", (experts, hidden), place_as_is)],
    }[part]


def _place_alternate(shards: int, target: np.ndarray, tensor: np.ndarray) -> None:
    """Write [..., 2F], gate and up in alternate columns, into S blocks [gate, up] of columns."""
    assert target.flags.c_contiguous, "a reshaped view is written"
    blocks = target.reshape(*target.shape[:-1], shards, 2, -1)
    for half in range(2):
        blocks[..., half, :] = tensor[..., half::2].reshape(*target.shape[:-1], shards, -1)
