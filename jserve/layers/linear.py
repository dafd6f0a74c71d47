"""Matrix products: one place decides precision and accumulation.

Weights are [I inputs, O outputs], so that a step multiplies them as they lie in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.rules import Rules

_SMALL = 2**24  # elements on a device


class Linear(nnx.Module):
    """y = x · w + b. `out_axis` is where the output's last axis lives: it places the collective."""

    def __init__(
        self, weight: nnx.Param, bias: nnx.Param | None, out_axis: str | None, rules: Rules
    ) -> None:
        self.weight, self.bias, self.out_axis, self.rules = weight, bias, out_axis, rules

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, I] → [T, O]
        y = contract(x, self.weight[...], self.rules, axis=0, out_dtype=x.dtype)
        y = self.rules.constrain(y, (None, self.out_axis))
        return y if self.bias is None else y + self.bias[...][None, :]


def contract(
    x: jax.Array, weight: jax.Array, rules: Rules, *, axis: int, out_dtype: jnp.dtype
) -> jax.Array:
    """Contract the last axis of `x` [T, I] with `axis` of the matrix `weight`, accumulating in
    float32; of float32 operands in the highest precision, or accelerators would round them."""
    # On GPUs XLA writes a single row's products with a small or transposed matrix before it sums
    # them: up to 5 times as long as the product of 8 rows takes.
    slow = axis == 1 or weight.size < _SMALL * rules.mesh.size
    spare = 7 if len(x) == 1 and rules.platform == "gpu" and slow else 0
    y = jax.lax.dot_general(
        jnp.pad(x, ((0, spare), (0, 0))), weight, (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )  # fmt: skip
    return y[: len(x)]
