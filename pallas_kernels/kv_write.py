"""Writes new keys and values into a paged pool: in place, when the pool is donated to the program.
Knows slots and layouts, nothing of rows or requests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.float8 import stored


def write_pages(pool: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """Pool with `values` [T, heads, D] at the flat token slots [T] (page · page_size + offset).

    Slots are in range; those of real tokens are distinct. Several padding tokens may share a slot
    of the trash page, where any of their values may land. A head_dim below the pool's is padded
    with zeros.
    """
    num_pages, page_size, heads, head_dim = pool.shape
    assert values.shape[1] == heads, f"{values.shape=} {pool.shape=}"
    narrow = pool.dtype.itemsize == 1
    values = stored(values, pool.dtype) if narrow else values.astype(pool.dtype)
    if values.shape[2] < head_dim:
        values = jnp.pad(values, ((0, 0), (0, 0), (0, head_dim - values.shape[2])))
    if values.shape[0] == 1:
        # NOTE: XLA turns a scatter of one row into a dynamic-update-slice, fuses that into each of
        # its consumers, and so copies the pool. The same row written twice stays a scatter.
        values, slots = jnp.tile(values, (2, 1, 1)), jnp.tile(slots, 2)
    # unique_indices spares GPUs the sort that makes colliding writes deterministic: only trash
    # slots collide, or equal values.
    how = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
    if 1 in (page_size, heads):
        # NOTE: XLA lays a reshaped pool with a dimension of 1 out anew, and so copies it.
        return pool.at[slots // page_size, slots % page_size].set(values, **how)
    flat = pool.reshape(num_pages * page_size, heads, head_dim)
    return flat.at[slots].set(values, **how).reshape(pool.shape)
