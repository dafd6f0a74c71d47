"""DeepSeek-V2 and V3: latent attention, and experts from the layer `first_k_dense_replace` on.

Checkpoint names stand beside the modules that own the tensors; tensors of the layers for
multi-token prediction are never asked for. Sources: arXiv 2405.04434, 2412.19437.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jserve.batch import CallContext
from jserve.errors import ConfigError
from jserve.layers.latent_attention import LatentAttention
from jserve.layers.linear import Linear
from jserve.layers.norm import RMSNorm
from jserve.layers.rope import Rotary
from jserve.models.blueprint import Blueprint, Feed, dense_mlp
from jserve.models.hf_values import count, count_or_none, flag, from_zero, number, one_of
from jserve.models.latent_layout import LatentLayout
from jserve.models.moe import MoENames
from jserve.models.rope_scaling import yarn_growth
from jserve.types import LatentConfig, ModelConfig, MoEConfig
from jserve.weights.spec import Piece
from pallas_kernels.attention import KVLayer, attend

_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_shared_experts": 0,
}
#: What configs may leave out, with the families' own values. A rank for queries is not among them:
#: without one there is none.
V2_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "rope_interleave": True,
}
V3_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_interleave": True,
}

NAMES = MoENames(shared="shared_experts")

#: Of the norms between two projections, whatever the config says of the others.
_INNER_EPS = 1e-6


class DeepseekBlock(nnx.Module):
    """Pre-norm attention and feed-forward around a residual stream. `name`: model.layers.<i>."""

    def __init__(
        self,
        make: Blueprint,
        path: str,
        name: str,
        window: int | None,
        feed: Feed = dense_mlp,
    ) -> None:
        assert window is None, f"{window=}"
        size = make.config.hidden_size
        self.attention_norm = make.norm(f"{path}.attention_norm", f"{name}.input_layernorm", size)
        self.attention = latent_attention(make, f"{path}.attention", f"{name}.self_attn")
        self.mlp_norm = make.norm(f"{path}.mlp_norm", f"{name}.post_attention_layernorm", size)
        self.mlp = feed(make, f"{path}.mlp", name)

    def __call__(
        self, x: jax.Array, kv_layer: KVLayer, angles: Rotary, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:  # x [T, C]
        with jax.named_scope("attention"):
            out, kv_layer = self.attention(self.attention_norm(x), kv_layer, angles, context)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), context), kv_layer


def latent_attention(make: Blueprint, path: str, name: str) -> LatentAttention:
    """Raises ConfigError on TPU, where attention copies the pool for want of a kernel."""
    config, latent, rules = make.config, make.config.latent, make.rules
    assert latent is not None, f"{config.architecture=}"
    if rules.platform == "tpu":
        raise ConfigError(
            f"{config.architecture} caches latents, for which there is no TPU kernel; GPU and CPU "
            "serve it"
        )
    layout = LatentLayout.of(latent, config.num_heads, rules.size("heads"))
    num_slots, rank, hidden = layout.num_slots, latent.query_rank, config.hidden_size
    query = "q_proj" if rank is None else "q_b_proj"
    size = (config.num_heads * layout.query_dim, rank or hidden)
    piece = Piece(f"{name}.{query}.weight", size, layout.place_query)
    shape = (rank or hidden, num_slots * layout.query_dim)
    query_weight = make.parameter(f"{path}.query.weight", shape, (None, "heads"), [piece])
    up = f"{name}.kv_b_proj.weight"
    up_size = (config.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)

    def per_head(which: str, shape: tuple[int, int], piece: Piece) -> nnx.Param:
        axes = ("heads", None, None)
        return make.parameter(f"{path}.{which}", (num_slots, *shape), axes, [piece])

    def inner_norm(which: str, tensor: str, size: int) -> RMSNorm:
        return RMSNorm(make.norm(f"{path}.{which}", f"{name}.{tensor}", size).weight, _INNER_EPS)

    scale = config.attention_scale
    return LatentAttention(
        _down(make, f"{path}.down", name, layout),
        Linear(query_weight, None, "heads", rules),
        per_head("keys", (latent.nope_dim, latent.kv_rank), Piece(up, up_size, layout.place_keys)),
        per_head(
            "values", (latent.kv_rank, latent.value_dim), Piece(up, up_size, layout.place_values)
        ),
        _output(make, f"{path}.output", f"{name}.o_proj", layout),
        None if rank is None else inner_norm("q_norm", "q_a_layernorm", rank),
        inner_norm("latent_norm", "kv_a_layernorm", latent.kv_rank),
        config=latent,
        op=functools.partial(
            attend,
            scale=layout.query_dim**-0.5 if scale is None else scale,
            implementation=make.backend,
            platform=rules.platform,
        ),
        rules=rules,
    )


def _down(make: Blueprint, path: str, name: str, layout: LatentLayout) -> Linear:
    """Queries' and latents' down projections as one, whole on every device."""
    config, latent = make.config, layout.latent
    parts = {f"{name}.kv_a_proj_with_mqa": (latent.cached_dim, layout.place_latent_down)}
    if latent.query_rank is not None:
        parts[f"{name}.q_a_proj"] = (latent.query_rank, layout.place_query_down)
    total = sum(width for width, _ in parts.values())

    def parameter(kind: str, lead: tuple[int, ...]) -> nnx.Param:
        pieces = [
            Piece(f"{tensor}.{kind}", (width, *lead), place)
            for tensor, (width, place) in parts.items()
        ]
        shape = (*lead, total)
        return make.parameter(f"{path}.{kind}", shape, (None,) * len(shape), pieces)

    bias = parameter("bias", ()) if config.output_bias else None
    return Linear(parameter("weight", (config.hidden_size,)), bias, None, make.rules)


def _output(make: Blueprint, path: str, name: str, layout: LatentLayout) -> Linear:
    config, width = make.config, layout.latent.value_dim
    size = (config.hidden_size, config.num_heads * width)
    piece = Piece(f"{name}.weight", size, layout.place_output)
    shape = (layout.num_slots * width, config.hidden_size)
    weight = make.parameter(f"{path}.weight", shape, ("heads", None), [piece])
    bias = make.vector(f"{path}.bias", f"{name}.bias", size[0], 0.0) if config.output_bias else None
    return Linear(weight, bias, None, make.rules)


def adapt_deepseek_v2(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Experts are chosen among all, or group_limited: groups are worth their best expert. Weights
    that are divided by their sum are not scaled.
    """
    limited = one_of(hf, "topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    one_of(hf, "scoring_func", ("softmax",))
    config = _latent(config, hf)
    moe = _experts(config, hf, group_by="max", groups=limited)
    if moe is not None and moe.renormalize:
        moe = dataclasses.replace(moe, scale=1.0)
    return dataclasses.replace(config, moe=moe)


def adapt_deepseek_v3(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Experts are chosen with a learned bias; groups are worth the sum of their best two."""
    one_of(hf, "topk_method", ("noaux_tc",))
    one_of(hf, "scoring_func", ("sigmoid",))
    config = _latent(config, hf)
    moe = _experts(config, hf, group_by="top2_sum", groups=True)
    if moe is not None:
        moe = dataclasses.replace(moe, scoring="sigmoid", score_bias=True)
    return dataclasses.replace(config, moe=moe)


def _latent(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """What both say of attention. `head_dim` is that of the rotated columns."""
    latent = LatentConfig(
        kv_rank=count(hf, "kv_lora_rank"),
        query_rank=count_or_none(hf, "q_lora_rank"),
        nope_dim=count(hf, "qk_nope_head_dim"),
        rope_dim=count(hf, "qk_rope_head_dim"),
        value_dim=count(hf, "v_head_dim"),
        interleaved=flag(hf, "rope_interleave"),
    )
    if latent.rope_dim % 2:
        raise ConfigError(
            f"the model's config: qk_rope_head_dim must be even, is {latent.rope_dim}"
        )
    numbers, growth = dict(config.rope.params), 1.0
    if numbers.get("mscale_all_dim"):
        growth = yarn_growth(numbers["factor"], numbers["mscale_all_dim"])
    return dataclasses.replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.rope_dim,
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * growth**2,
        output_bias=flag(hf, "attention_bias"),
        mlp_bias=flag(hf, "mlp_bias"),
    )


def _experts(
    config: ModelConfig, hf: Mapping[str, Any], *, group_by: str, groups: bool
) -> MoEConfig | None:
    """None where every layer is dense."""
    first, step = from_zero(hf, "first_k_dense_replace"), count(hf, "moe_layer_freq")
    sparse = tuple(n >= first and n % step == 0 for n in range(config.num_layers))
    if "n_routed_experts" not in hf or not any(sparse):
        return None
    experts, top_k = count(hf, "n_routed_experts"), count(hf, "num_experts_per_tok")
    num, top = (count(hf, "n_group", 1), count(hf, "topk_group", 1)) if groups else (1, 1)
    width = count(hf, "moe_intermediate_size")
    if experts % num or top > num or top_k > top * experts // num:
        raise ConfigError(
            f"the model's config: {top_k} of {experts} experts cannot be chosen in {top} of "
            f"{num} groups (num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    if group_by == "top2_sum" and num == experts and num > 1:
        raise ConfigError(f"the model's config: groups of one expert: n_group {num}")
    return MoEConfig(
        num_experts=experts,
        top_k=top_k,
        width=width,
        renormalize=flag(hf, "norm_topk_prob"),
        scale=number(hf, "routed_scaling_factor", 1.0),
        num_groups=num,
        top_groups=top,
        group_by=group_by,
        shared_width=from_zero(hf, "n_shared_experts") * width,
        activation=config.activation,
        sparse_layers=sparse,
    )
