"""Gemma 3 text: norms around both branches, sliding layers with a rope of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jserve.batch import CallContext
from jserve.errors import ConfigError
from jserve.layers.rope import Rotary
from jserve.models.blueprint import Blueprint, dense_mlp
from jserve.models.hf_config import rope_config, rope_settings
from jserve.models.hf_values import count, flag, layer_kinds, number, number_or_none, section
from jserve.types import ModelConfig
from pallas_kernels.attention import KVLayer

#: What the released configs leave out, with Gemma 3's own defaults.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

#: Checkpoints hold each norm's scale minus one.
NORM_OFFSET = 1.0


class Gemma3Block(nnx.Module):
    """As LlamaBlock, with a norm after each branch too, before it joins the residual stream."""

    def __init__(self, make: Blueprint, path: str, name: str, window: int | None) -> None:
        size = make.config.hidden_size
        self.attention_norm = make.norm(f"{path}.attention_norm", f"{name}.input_layernorm", size)
        self.attention = make.attention(f"{path}.attention", f"{name}.self_attn", window)
        self.attention_out_norm = make.norm(
            f"{path}.attention_out_norm", f"{name}.post_attention_layernorm", size
        )
        self.mlp_norm = make.norm(f"{path}.mlp_norm", f"{name}.pre_feedforward_layernorm", size)
        self.mlp = dense_mlp(make, f"{path}.mlp", name)
        self.mlp_out_norm = make.norm(
            f"{path}.mlp_out_norm", f"{name}.post_feedforward_layernorm", size
        )

    def __call__(
        self, x: jax.Array, kv_layer: KVLayer, angles: Rotary, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:  # x [T, C]
        with jax.named_scope("attention"):
            out, kv_layer = self.attention(self.attention_norm(x), kv_layer, angles, context)
            x = x + self.attention_out_norm(out)
        with jax.named_scope("mlp"):
            return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), context)), kv_layer


def adapt_gemma3(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Both ropes come from `rope_parameters` by layer type, or from rope_theta,
    rope_local_base_freq and rope_scaling.
    """
    if flag(hf, "use_bidirectional_attention"):
        raise ConfigError(
            "Gemma 3 with use_bidirectional_attention is an encoder; it cannot generate"
        )
    pattern, window = count(hf, "sliding_window_pattern"), count(hf, "sliding_window")
    usual = [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(config.num_layers)
    ]
    by_kind = rope_settings(hf)
    if "full_attention" not in by_kind:
        by_kind = {"full_attention": by_kind}
    full, sliding = (section(by_kind, kind) for kind in ("full_attention", "sliding_attention"))
    bias = flag(hf, "attention_bias")
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        windows=tuple(
            window if kind == "sliding_attention" else None for kind in layer_kinds(hf, usual)
        ),
        rope=rope_config(hf, full, theta=number(hf, "rope_theta", 1e6)),
        rope_local=rope_config(hf, sliding, theta=number(hf, "rope_local_base_freq", 1e4)),
        attention_scale=number(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=number_or_none(hf, "attn_logit_softcapping"),
        final_soft_cap=number_or_none(hf, "final_logit_softcapping"),
        embed_scale=config.hidden_size**0.5,
    )
