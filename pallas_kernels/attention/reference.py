"""The oracle: what every other implementation must equal. Written to be read; its speed is nobody's
concern.

One token at a time, in float32: gather every page of the token's row, mask, softmax, weigh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.float8 import loaded


def attention(
    q: jax.Array,  # [T, H, D]
    kv_layer: KVLayer,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of each token over its row's pages; reads every pool layout. Returns [T, H, D] in
    q's dtype, D of the values.
    """
    heads, head_dim = q.shape[1:]
    rows, pages_per_row = meta.page_table.shape
    page_size = kv_layer.k.shape[1]
    key_positions = jnp.arange(pages_per_row * page_size)

    def one_token(token: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, row, position = token
        pages = meta.page_table[jnp.minimum(row, rows - 1)] + kv_layer.first_page
        keys, values = (
            loaded(x, jnp.float32) for x in _gather(kv_layer, pages, head_dim)
        )  # [S, K, D]
        visible = key_positions <= position
        if window is not None:
            visible &= key_positions > position - window
        values = jnp.where(
            visible[:, None, None], values, 0.0
        )  # NOTE: 0 · NaN of a stale slot would be NaN
        grouped = query.astype(jnp.float32).reshape(keys.shape[1], -1, head_dim)  # [K, G, D]
        scores = jnp.einsum("kgd,skd->kgs", grouped, keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible[None, None, :], scores, -jnp.inf)
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(*grouped.shape[:2], 1)
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(key_positions)]
        out = jnp.einsum("kgs,skd->kgd", weights, values, precision="highest")
        return jnp.where(row < rows, out.reshape(heads, -1), 0.0)

    return jax.lax.map(one_token, (q, meta.token_rows, meta.positions)).astype(q.dtype)


def _gather(kv_layer: KVLayer, pages: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values [S, K, D] of `pages`, in order."""
    k = kv_layer.k[pages].reshape(-1, *kv_layer.k.shape[2:])[..., :head_dim]
    if kv_layer.value_dim is not None:
        return k, k[..., : kv_layer.value_dim]
    if kv_layer.v is None:
        return k[:, 0::2], k[:, 1::2]
    v = kv_layer.v[pages].reshape(-1, *kv_layer.v.shape[2:])[..., :head_dim]
    return k, v
