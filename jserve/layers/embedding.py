"""The vocabulary's two ends: token ids → hidden rows, and hidden rows → logits. Split over `vocab`.

Legend: V vocabulary, C hidden size. The matrix is [V, C] at both ends, so a tied head is the same
array; zero rows are appended until the shards are whole blocks of lanes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.layers.linear import contract
from sharding.rules import Rules
from sharding.split_rows import split_lookup, split_product


class Embedding(nnx.Module):
    """`scale` multiplies looked-up rows (Gemma)."""

    def __init__(self, weight: nnx.Param, rules: Rules, scale: float = 1.0) -> None:
        self.weight, self.rules, self.scale = weight, rules, scale

    def __call__(self, token_ids: jax.Array) -> jax.Array:  # [T] → [T, C]
        if self.rules.size("vocab") > 1:
            rows = split_lookup(self.weight[...], token_ids, "vocab", self.rules)
        else:  # clipped, because the default mode answers an id out of range with NaN
            rows = jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, C] → float32 [N, V'], the appended rows' columns included, split over `vocab`."""
        how = {"rules": self.rules, "axis": 1, "out_dtype": jnp.dtype("float32")}
        if self.rules.size("vocab") > 1:
            return split_product(contract, hidden, self.weight[...], "vocab", **how)
        return contract(hidden, self.weight[...], **how)
