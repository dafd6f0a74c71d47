"""The oracle: what every other implementation must equal. Written to be read; its speed is nobody's
concern: every row meets every group's matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # [G]
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """[M, O], computed in float32."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def one_group(
        out: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        matrix, size, end = group
        matrix = matrix.astype(x.dtype).astype(jnp.float32)
        product = jnp.matmul(x.astype(jnp.float32), matrix, precision="highest")
        return jnp.where((row >= end - size) & (row < end), product, out), None

    out = jnp.zeros((x.shape[0], weights.shape[2]), jnp.float32)
    return jax.lax.scan(one_group, out, (weights, group_sizes, ends))[0].astype(out_dtype)
