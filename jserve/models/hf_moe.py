"""What Hugging Face configs of Mixtral, Qwen2-MoE and Qwen3-MoE say of their experts, and what
their checkpoints call them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models.hf_llama import (
    adapt_mistral,
    adapt_qwen2,
    adapt_qwen3,
    qwen_windows,
    used_window,
)
from jserve.models.hf_values import count, flag, from_zero, layer_kinds, numbers_from_zero
from jserve.models.moe import MoENames
from jserve.types import ModelConfig, MoEConfig

MIXTRAL = MoENames(block="block_sparse_moe", halves=("w1", "w3"), down="w2")

#: What configs may leave out, with the families' own values.
MIXTRAL_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN2_MOE_DEFAULTS: Mapping[str, Any] = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
QWEN3_MOE_DEFAULTS: Mapping[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def adapt_mixtral(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """`intermediate_size` is one expert's. Softmax over the chosen logits is what the family means
    by softmax over all, divided by the sum of the chosen.
    """
    num_experts, top_k = choice_of(hf)
    moe = MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        width=config.intermediate_size,
        scoring="softmax_topk",
        activation=config.activation,
        sparse_layers=(True,) * config.num_layers,
    )
    return dataclasses.replace(adapt_mistral(config, hf), moe=moe)


def adapt_qwen2_moe(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    qkv_bias, windows = flag(hf, "qkv_bias", True), _qwen2_moe_windows(config, hf)
    config = dataclasses.replace(adapt_qwen2(config, hf), qkv_bias=qkv_bias, windows=windows)
    shared = count(hf, "shared_expert_intermediate_size")
    moe = dataclasses.replace(_qwen(config, hf), shared_width=shared, shared_gate=True)
    return dataclasses.replace(config, moe=moe)


def _qwen2_moe_windows(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """With use_sliding_window, of every other layer before max_window_layers, or as layer_types
    says."""
    before = from_zero(hf, "max_window_layers", 28)
    usual = [
        "sliding_attention" if layer % 2 == 0 and layer < before else "full_attention"
        for layer in range(config.num_layers)
    ]
    return qwen_windows(hf, layer_kinds(hf, usual))


def adapt_qwen3_moe(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Every layer has the window, where there is one."""
    windows = (used_window(hf),) * config.num_layers
    config = dataclasses.replace(adapt_qwen3(config, hf), windows=windows)
    return dataclasses.replace(config, moe=_qwen(config, hf))


def choice_of(hf: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts there are and how many a token gets; raises ConfigError where that is more.
    transformers 5 writes num_local_experts where the released configs have num_experts.
    """
    key = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    experts, top_k = count(hf, key), count(hf, "num_experts_per_tok")
    if top_k > experts:
        rule = f"num_experts_per_tok {top_k} is over {key} {experts}"
        raise ConfigError(f"the model's config: {rule}")
    return experts, top_k


def _qwen(config: ModelConfig, hf: Mapping[str, Any]) -> MoEConfig:
    """Every `decoder_sparse_step`-th layer is sparse, but those of `mlp_only_layers`. What
    `norm_topk_prob` asks for is softmax over the chosen logits.
    """
    step = count(hf, "decoder_sparse_step", 1)
    dense = numbers_from_zero(hf, "mlp_only_layers")
    num_experts, top_k = choice_of(hf)
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        width=count(hf, "moe_intermediate_size"),
        scoring="softmax_topk" if flag(hf, "norm_topk_prob") else "softmax",
        activation=config.activation,
        sparse_layers=tuple(
            (layer + 1) % step == 0 and layer not in dense for layer in range(config.num_layers)
        ),
    )
