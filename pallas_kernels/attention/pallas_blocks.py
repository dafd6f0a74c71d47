"""What the kernels for Pallas's Triton backend share; device code only."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MASKED = -1e30  # finite, so that a block without visible keys yields no NaN
LOG2E = math.log2(math.e)


def locate(cu_q_lens_ref: Any, tile: jax.Array, query_block: int) -> tuple[jax.Array, jax.Array]:
    """Row of a tile, and the row's query that it begins with (beyond the row's end for a spare
    tile).

    Row r's tiles begin at cu_q_lens[r] // query_block + r: rows never share a tile, and no scan is
    needed.
    """
    rows = cu_q_lens_ref.shape[0] - 1
    lane = jnp.arange(pl.next_power_of_2(max(rows, 2)))
    first_tile = cu_q_lens_ref[jnp.minimum(lane, rows)] // query_block + lane
    row = jnp.sum(((first_tile <= tile) & (lane < rows)).astype(jnp.int32)) - 1
    return row, (tile - cu_q_lens_ref[row] // query_block - row) * query_block


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32; float32 inputs in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
