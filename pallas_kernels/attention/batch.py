"""The records an attention call is described by, shared by every implementation of the op."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMeta:
    """What the batch looks like, computed once a step and shared by all layers. All int32, on
    device.

    Padding rows have kv_lens 0 and q_len 0; padding tokens have token_rows R (out of range),
    position 0 and slot 0 (the trash page). `max_q_len` is static: 1 for a decode step, None for
    ragged rows.
    """

    cu_q_lens: jax.Array  # [R + 1] token offset of each row; padding rows repeat the total
    kv_lens: jax.Array  # [R] context length with this step's tokens
    page_table: jax.Array  # [R, P] page ids, layer offset not included
    positions: jax.Array  # [T]
    token_rows: jax.Array  # [T]
    write_slots: jax.Array  # [T] page · page_size + offset of each token, layer offset not included
    distribution: jax.Array  # [2] decode rows, real rows
    max_q_len: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's view of a flat pool: the whole pool and the layer's first page.

    Split layout (GPU, CPU): k and v are [L · pages, page, K, D]. Fused layout (TPU): k is [L ·
    pages, page, 2 · K, D] with K at even and V at odd heads, v is None. Latent layout: k is [L ·
    pages, page, 1, D], v is None; a token's value are the first `value_dim` columns of its key.
    """

    k: jax.Array
    v: jax.Array | None
    first_page: jax.Array  # int32 scalar = layer · pages
    value_dim: int | None = dataclasses.field(default=None, metadata={"static": True})


def interleave_heads(k: jax.Array, v: jax.Array) -> jax.Array:
    """[T, K, D] → [T, 2 · K, D] of the fused layout: keys at even heads, values at odd ones."""
    tokens, heads, head_dim = k.shape
    return jnp.stack([k, v], axis=2).reshape(tokens, 2 * heads, head_dim)
