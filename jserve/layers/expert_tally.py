"""How many tokens each expert of each sparse layer was given, counted on the device.

Owns the count of one step; who carries the sum on is the pool, who reads it runner/expert_load.py.
Legend: T tokens, L sparse layers, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def add_chosen(
    tally: jax.Array, chosen: Sequence[jax.Array]
) -> jax.Array:  # int32 [L, E] → the same
    """With a step's choices, int32 [T, k] of each layer in order; E is nobody. Wraps."""
    experts = jnp.arange(tally.shape[1], dtype=jnp.int32)
    mine = jnp.stack(chosen)[..., None] == experts[None, None, None, :]  # [L, T, k, E]
    return tally + jnp.sum(mine, axis=(1, 2), dtype=jnp.int32)
