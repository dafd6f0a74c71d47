"""The grouped matmul as a plain XLA loop over tiles of rows: what serves CPU, and the fallback of
every other platform.

A tile is up to `block` consecutive rows of one group, and the loop has as many rounds as the groups
need tiles: groups without rows cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_MIN_BLOCK, _MAX_BLOCK = 8, 128


def matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # [G]
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """[M, O]."""
    rows, groups = x.shape[0], weights.shape[0]
    block = min(max(rows // groups, _MIN_BLOCK), _MAX_BLOCK, rows)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    row_ends = jnp.cumsum(group_sizes)
    tiles = (group_sizes + block - 1) // block
    tile_ends = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, block), (0, 0)))  # the last tile may reach past M

    def one_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
        within = tile - (tile_ends[group] - tiles[group])
        start = row_ends[group] - group_sizes[group] + within * block
        product = lax.dot(
            lax.dynamic_slice_in_dim(padded, start, block),
            lax.dynamic_index_in_dim(weights, group, keepdims=False).astype(x.dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        # What a tile writes behind its group's rows, the next one overwrites.
        return lax.dynamic_update_slice_in_dim(out, product.astype(out_dtype), start, axis=0)

    out = jnp.zeros((rows + block, weights.shape[2]), out_dtype)
    out = lax.fori_loop(0, tile_ends[-1], one_tile, out)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < row_ends[-1], out, jnp.zeros((), out_dtype))
