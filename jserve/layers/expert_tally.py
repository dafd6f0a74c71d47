"""How many tokens each expert of each sparse layer was given, counted on the device.

Owns the count of one step; who carries the sum on is the pool, who reads it runner/expert_load.py.
Legend: T tokens, L sparse layers, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attention import AttentionMeta


def add_chosen(
    tally: jax.Array, chosen: Sequence[jax.Array], meta: AttentionMeta
) -> jax.Array:  # int32 [L, E] → the same
    """With a step's choices, int32 [T, k] of each layer in order; padding has made none. Wraps."""
    real = meta.token_rows < meta.kv_lens.shape[0]  # [T]
    ids = jnp.where(real[None, :, None], jnp.stack(chosen), -1)  # [L, T, k]
    experts = jnp.arange(tally.shape[1], dtype=jnp.int32)
    mine = ids[..., None] == experts[None, None, None, :]
    return tally + jnp.sum(mine, axis=(1, 2), dtype=jnp.int32)
