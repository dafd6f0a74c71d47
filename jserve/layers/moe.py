"""A mixture of experts in place of a feed-forward layer: which experts a token gets, what they
compute, and what is added to it. Where they live is sharding/experts.py's.

Legend: T tokens, C hidden size, E experts, k experts of a token, F intermediate size of one, S
shards of it. Columns of gate and up lie as in mlp.py, for each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.batch import CallContext
from jserve.layers.linear import Linear, contract
from jserve.layers.mlp import GatedMLP
from jserve.types import MoEConfig
from pallas_kernels.gmm import gated
from pallas_kernels.routing import sort_by_expert, take_rows, top_k
from sharding.experts import apply_experts, weighted_sum
from sharding.rules import Rules

#: Axes of the experts' parameters: gate and up [E, C, 2F], down [E, F, C], and their biases.
GATE_UP_AXES = ("expert", None, "expert_mlp")
DOWN_AXES = ("expert", "expert_mlp", None)
GATE_UP_BIAS_AXES = ("expert", "expert_mlp")


class Router(nnx.Module):
    """`weight` [C, E]; `bias` [E] is added to the logits, `score_bias` float32 [E] to what the
    choice is made by."""

    def __init__(
        self,
        weight: nnx.Param,
        bias: nnx.Param | None,
        score_bias: nnx.Param | None,
        config: MoEConfig,
        rules: Rules,
    ) -> None:
        self.weight, self.bias, self.score_bias = weight, bias, score_bias
        self.config, self.rules = config, rules

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, C] → float32 weights [T, k] and int32 experts [T, k]; of tokens that are not `real`
        (bool [T]) 0 and E, which is nobody."""
        float32 = jnp.dtype(jnp.float32)
        logits = contract(x, self.weight[...], self.rules, axis=0, out_dtype=float32)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(float32)[None, :]
        score_bias = None if self.score_bias is None else self.score_bias[...]
        whole = self.rules.spec(())
        # Each device chooses for itself: the compiler cannot split a kernel.
        return self.rules.on_devices(self._choose, whole, whole)(logits, score_bias, real)

    def _choose(
        self, logits: jax.Array, score_bias: jax.Array | None, real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        config, real = self.config, real[:, None]
        weights, ids = route(logits, score_bias, config=config, platform=self.rules.platform)
        return jnp.where(real, weights, 0.0), jnp.where(real, ids, config.num_experts)


class MoE(nnx.Module):
    """`matmul` is grouped_matmul of pallas_kernels.gmm with this layer's static arguments. `down`'s
    bias [E, C] is added behind the sum over devices, once."""

    def __init__(
        self,
        router: Router,
        gate_up: nnx.Param,
        down: nnx.Param,
        gate_up_bias: nnx.Param | None,
        down_bias: nnx.Param | None,
        shared: GatedMLP | None,
        shared_gate: Linear | None,
        *,
        activation: str,
        matmul: Callable[..., jax.Array],
        rules: Rules,
    ) -> None:
        self.router, self.gate_up, self.down = router, gate_up, down
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.shared, self.shared_gate = shared, shared_gate
        self.activation, self.matmul, self.rules = activation, matmul, rules

    def __call__(self, x: jax.Array, context: CallContext) -> jax.Array:  # [T, C] → [T, C]
        with jax.named_scope("router"):
            weights, ids = self.router(x, context.real)
            ranks = self.rules.ranks
            self.sow(nnx.Intermediate, "chosen", ids if ranks is None else ranks.own(ids))
        params, axes = [self.gate_up[...], self.down[...]], [GATE_UP_AXES, DOWN_AXES]
        if self.gate_up_bias is not None:
            params.append(self.gate_up_bias[...])
            axes.append(GATE_UP_BIAS_AXES)
        with jax.named_scope("experts"):
            y = apply_experts(self._compute, x, weights, ids, params, axes, self.rules)
        if self.down_bias is not None:
            added = _mix(weights, ids, self.down_bias[...], self.rules)
            y = y + added.astype(x.dtype)
        if self.shared is not None:
            with jax.named_scope("shared"):
                y = y + self._shared(x, self.shared, context)
        return y

    def _compute(
        self,
        x: jax.Array,  # [T, C]
        weights: jax.Array,
        ids: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        bias: jax.Array | None = None,
    ) -> jax.Array:  # [T, C]
        """What one device's experts, or its slices of them, make of tokens; as sharding.experts'
        Compute."""
        platform = self.rules.platform
        tokens, places, sizes = sort_by_expert(ids, len(gate_up), platform=platform)
        rows = take_rows(x, tokens, platform=platform)
        if bias is None:
            rows = self.matmul(rows, gate_up, sizes, gate=self.activation)
        else:
            wide = self.matmul(rows, gate_up, sizes)
            ends, order = jnp.cumsum(sizes), jnp.arange(len(wide))
            experts = jnp.sum(order[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
            rows = gated(wide + jnp.take(bias, experts, axis=0, mode="clip"), self.activation)
        return weighted_sum(self.matmul(rows, down, sizes), places, weights)

    def _shared(self, x: jax.Array, shared: GatedMLP, context: CallContext) -> jax.Array:
        y = shared(x, context)
        return y if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * y


def route(
    logits: jax.Array,
    score_bias: jax.Array | None,
    *,
    config: MoEConfig,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """float32 weights and int32 experts, both [T, k], of float32 logits [T, E]."""
    best = functools.partial(top_k, count=config.top_k, platform=platform)
    if config.scoring == "softmax_topk":
        top, ids = best(logits)
        weights = jax.nn.softmax(top, axis=-1)
    else:
        score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[config.scoring]
        scores = score(logits)
        choice = scores if score_bias is None else scores + score_bias[None, :]
        _, ids = best(_in_best_groups(choice, config))
        weights = jnp.take_along_axis(scores, ids, axis=1)
    if config.renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return weights * config.scale, ids


def _in_best_groups(choice: jax.Array, config: MoEConfig) -> jax.Array:
    """`choice` [T, E] with −inf for the experts of the other groups."""
    if config.num_groups == 1:
        return choice
    groups = choice.reshape(len(choice), config.num_groups, -1)
    counted = {"max": 1, "top2_sum": 2}[config.group_by]
    worth = jnp.sum(jax.lax.top_k(groups, counted)[0], axis=-1)
    _, best = jax.lax.top_k(worth, config.top_groups)
    chosen = jnp.any(best[:, :, None] == jnp.arange(config.num_groups)[None, None, :], axis=1)
    return jnp.where(chosen[:, :, None], groups, -jnp.inf).reshape(choice.shape)


def _mix(weights: jax.Array, ids: jax.Array, rows: jax.Array, rules: Rules) -> jax.Array:
    """float32 [T, C]: each token's weighted sum of its experts' rows [E, C]."""
    chosen = ids[:, :, None] == jnp.arange(len(rows))[None, None, :]
    dense = jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1)  # [T, E]
    float32 = jnp.dtype(jnp.float32)
    return contract(dense, rows.astype(float32), rules, axis=0, out_dtype=float32)
