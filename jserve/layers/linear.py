"""Matrix products: one place decides precision and accumulation.

Weights are [I inputs, O outputs], so that a step multiplies them as they lie in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.rules import Rules


class Linear(nnx.Module):
    """y = x · w + b. `out_axis` is where the output's last axis lives: it places the collective."""

    def __init__(
        self, weight: nnx.Param, bias: nnx.Param | None, out_axis: str | None, rules: Rules
    ) -> None:
        self.weight, self.bias, self.out_axis, self.rules = weight, bias, out_axis, rules

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, I] → [T, O]
        y = contract(x, self.weight[...], axis=0, out_dtype=x.dtype)
        y = self.rules.constrain(y, (None, self.out_axis))
        return y if self.bias is None else y + self.bias[...][None, :]


def contract(x: jax.Array, weight: jax.Array, *, axis: int, out_dtype: jnp.dtype) -> jax.Array:
    """Contract the last axis of `x` with `axis` of the matrix `weight`, accumulating in float32.
    float32 operands ask for the highest precision: accelerators would round them to bfloat16.
    """
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
