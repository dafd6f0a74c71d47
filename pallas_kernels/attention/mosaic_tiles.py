"""How the prefill kernels for Hopper deal their tiles to the multiprocessors: once, the longest
first, back and forth, so that each gets about as much.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.batch import AttentionMeta

LEAST_TOKENS = 512  # of a step; a smaller one gains less than a start loses by compiling a kernel


def tile_table(
    meta: AttentionMeta, first_page: jax.Array, num_tiles: int, *, queries: int, least: int
) -> jax.Array:
    """int32 [tiles, 8], the longest first: row, the tile's first query in the row, the row's first
    token, its new tokens, its context; the layer's first page, the number of tiles, the tokens
    that are no padding.

    One fresh array, because the kernel's inputs must be aligned as the parts of an upload are not.

    Args:
        num_tiles: at least as many as there may be.
        queries: of a tile.
        least: new tokens of a row that gets tiles.
    """
    rows = jnp.arange(meta.kv_lens.shape[0], dtype=jnp.int32)
    q_lens = meta.cu_q_lens[1:] - meta.cu_q_lens[:-1]
    served = (rows >= meta.distribution[0]) & (rows < meta.distribution[1]) & (q_lens >= least)
    counts = jnp.where(served, (q_lens + (queries - 1)) // queries, 0)
    # Rows are few: a masked sum is one launch where a prefix sum is several.
    ends = jnp.sum(jnp.where(rows[None, :] <= rows[:, None], counts[None, :], 0), axis=1)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, len(rows) - 1)
    offset = (ends[row] - 1 - tile) * queries
    length = meta.kv_lens[row] - q_lens[row] + offset  # but for the tile's own queries
    length = jnp.where(tile < ends[-1], length, -1)
    longer, equal = length[None, :] > length[:, None], length[None, :] == length[:, None]
    rank = jnp.sum(longer | (equal & (tile[None, :] < tile[:, None])), axis=1)
    of_layer = (jnp.broadcast_to(x, row.shape) for x in (first_page, ends[-1], meta.cu_q_lens[-1]))
    columns = (row, offset, meta.cu_q_lens[row], q_lens[row], meta.kv_lens[row], *of_layer)
    unsorted = jnp.stack(columns, axis=1)
    return jnp.zeros_like(unsorted).at[rank].set(unsorted, unique_indices=True)


def num_dealt(total: jax.Array, processor: jax.Array, processors: int) -> jax.Array:
    """How many of `total` tiles a processor gets."""
    rounds = lax.div(total, jnp.int32(processors))
    rest = total - rounds * processors
    place = dealt(rounds, processor, processors) - rounds * processors
    return rounds + jnp.where(place < rest, 1, 0)


def dealt(index: jax.Array, processor: jax.Array, processors: int) -> jax.Array:
    """Number of the `index`th tile of a processor: forth in even rounds and back in odd ones."""
    back = lax.rem(index, jnp.int32(2)) == 1
    return index * processors + jnp.where(back, processors - 1 - processor, processor)
