"""The grouped matmul as XLA's own ragged dot: what serves TPUs, where XLA has a kernel for it.
Elsewhere XLA multiplies every row by every group's matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # [G]
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """[M, O]."""
    owned = jnp.arange(x.shape[0])[:, None] < jnp.sum(group_sizes)
    out = lax.ragged_dot(
        x,
        weights.astype(x.dtype),
        group_sizes,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(owned, out, 0.0).astype(out_dtype)
