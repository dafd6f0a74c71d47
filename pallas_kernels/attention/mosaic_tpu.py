"""Attention on TPUs: JAX's bundled ragged paged attention over the fused pool; the write is ours.

The pool's head_dim is 128 whatever the model's (the kernel takes nothing else); kv_write pads with
zeros, which change no score, and the padded columns of the output are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.tuning import block_sizes

HEAD_DIM = 128


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
    """Attention of a ragged batch over a fused pool. Returns [T, H, D] in q's dtype."""
    if kv_layer.v is not None or kv_layer.value_dim is not None:
        raise NotImplementedError("mosaic_tpu reads the fused KV layout only")
    if sinks is not None:
        raise NotImplementedError("mosaic_tpu has no attention sinks")
    if kv_layer.k.shape[3] != HEAD_DIM:
        raise NotImplementedError(
            f"mosaic_tpu needs a pool of head_dim {HEAD_DIM}: {kv_layer.k.shape=}"
        )
    narrow = kv_layer.k.dtype.itemsize == 1
    if narrow and kv_layer.k.shape[2] % 4:
        raise NotImplementedError(
            f"mosaic_tpu loads float8 of two KV heads at a time: {kv_layer.k.shape=}"
        )
    head_dim = q.shape[2]
    page_size, kv_lens, table = kv_layer.k.shape[1], meta.kv_lens, meta.page_table
    if window is not None:
        table, kv_lens = _from_window(meta, window, page_size, meta.max_q_len or q.shape[0])
    width = table.shape[1]
    sizes = block_sizes("mosaic_tpu")
    out = ragged_paged_attention(
        jnp.pad(q, ((0, 0), (0, 0), (0, HEAD_DIM - head_dim))),
        kv_layer.k,
        kv_lens,
        table + kv_layer.first_page,
        meta.cu_q_lens,
        meta.distribution[1:],
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        # A scale also converts keys and values to q's dtype.
        k_scale=1.0 if narrow else None,
        v_scale=1.0 if narrow else None,
        # Without explicit sizes the kernel asks the process's first device, which is not the
        # target's ahead of time.
        num_kv_pages_per_block=min(width, max(1, sizes["kv_tokens"] // page_size)),
        num_queries_per_block=min(sizes["queries"], q.shape[0]),
    )
    real = meta.token_rows < meta.kv_lens.shape[0]
    return jnp.where(real[:, None, None], out[..., :head_dim], 0)


def _from_window(
    meta: AttentionMeta, window: int, page_size: int, max_q_len: int
) -> tuple[jax.Array, jax.Array]:
    """Page tables and lengths of contexts that begin with the first page that a query sees.

    The kernel reads every page of a context, and only distances count. What lies before the window
    is not read then, whatever the table says.
    """
    q_lens = meta.cu_q_lens[1:] - meta.cu_q_lens[:-1]
    first = jnp.maximum(meta.kv_lens - q_lens + 1 - window, 0) // page_size  # [R]
    longest = meta.page_table.shape[1]
    width = min(longest, (window + max_q_len) // page_size + 2)
    column = jnp.minimum(first[:, None] + jnp.arange(width)[None, :], longest - 1)
    table = jnp.take_along_axis(meta.page_table, column, axis=1)
    return table, meta.kv_lens - first * page_size
