"""Attention on GPUs through jax-triton: flash decoding and ragged prefill written in Triton itself.

Simple rather than fast: a mixed batch runs every row, decode rows too, through the prefill kernel.
jax-triton and triton are optional; without them, or without a GPU build of JAX, the op says so with
NotImplementedError.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.splits import combine_splits
from pallas_kernels.attention.tuning import block_sizes


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
    """Attention of a ragged batch over a split pool, accumulated in float32. Returns [T, H, D] in
    q's dtype.
    """
    if kv_layer.v is None:
        raise NotImplementedError("jax_triton reads the split KV layout only")
    if kv_layer.k.shape[3] != q.shape[2]:
        raise NotImplementedError(
            f"jax_triton needs a pool of q's head_dim: {q.shape=} {kv_layer.k.shape=}"
        )
    try:
        jax_triton = importlib.import_module("jax_triton")  # the package, not this module
        from pallas_kernels.attention import triton_kernels
    except ImportError as error:
        raise NotImplementedError(f"jax-triton cannot be used here: {error}") from error
    heads, head_dim = q.shape[1:]
    kv_heads = kv_layer.k.shape[2]
    settings = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": max(16, jax_triton.next_power_of_2(head_dim)),
        "PAGE": kv_layer.k.shape[1],
        "PAGES": meta.page_table.shape[1],
        "SCALE": scale,
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
    }
    # A sink of −∞ has no weight.
    sinks = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    serve = _decode if meta.max_q_len == 1 else _prefill
    return serve(q, kv_layer, sinks, meta, triton_kernels, jax_triton.triton_call, settings)


def _decode(
    q: jax.Array,
    kv_layer: KVLayer,
    sinks: jax.Array,  # [H] float32
    meta: AttentionMeta,
    kernels: Any,
    call: Any,
    settings: dict[str, Any],
) -> jax.Array:
    tokens, heads, head_dim = q.shape
    rows, kv_heads = meta.kv_lens.shape[0], settings["KV_HEADS"]
    sizes = block_sizes("jax_triton.decode", programs=rows * kv_heads)
    splits, float32 = sizes["splits"], q.dtype == jnp.float32
    parts = (rows, splits, heads)
    out = call(
        *_inputs(q, kv_layer, meta),
        kernel=kernels.flash_decode,
        out_shape=(
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(kv_heads, rows, splits),
        num_warps=sizes["warps"],
        num_stages=sizes["stages"],
        LANES=max(16, _power_of_two(heads // kv_heads)),
        BLOCK=sizes["block"] // 2 if float32 else sizes["block"],
        SPLITS=splits,
        PRECISION=_precision(q),
        **settings,
    )
    combined = combine_splits(*out, sinks=sinks).astype(q.dtype)[:tokens]
    return jnp.pad(combined, ((0, tokens - combined.shape[0]), (0, 0), (0, 0)))


def _prefill(
    q: jax.Array,
    kv_layer: KVLayer,
    sinks: jax.Array,  # [H] float32
    meta: AttentionMeta,
    kernels: Any,
    call: Any,
    settings: dict[str, Any],
) -> jax.Array:
    tokens, heads, head_dim = q.shape
    rows, kv_heads = meta.kv_lens.shape[0], settings["KV_HEADS"]
    sizes = block_sizes("jax_triton.prefill", head_dim=head_dim)
    float32 = q.dtype == jnp.float32
    padded = _power_of_two(heads // kv_heads)
    query_block = max(1, (min(sizes["queries"], 64) if float32 else sizes["queries"]) // padded)
    out = call(
        *_inputs(q, kv_layer, meta),
        sinks,
        kernel=kernels.ragged_prefill,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tokens // query_block + rows, kv_heads),
        num_warps=sizes["warps"],
        num_stages=sizes["stages"],
        PADDED=padded,
        QUERY_BLOCK=query_block,
        BLOCK=sizes["block"] // 2 if float32 else sizes["block"],
        ROWS=rows,
        ROW_LANES=_power_of_two(rows),
        PRECISION=_precision(q),
        **settings,
    )
    real = meta.token_rows < rows  # the kernel leaves padding tokens unwritten
    return jnp.where(real[:, None, None], out, 0)


def _inputs(q: jax.Array, kv_layer: KVLayer, meta: AttentionMeta) -> tuple[jax.Array, ...]:
    assert kv_layer.v is not None
    first_page = kv_layer.first_page.reshape(1)
    return (
        first_page,
        meta.distribution,
        meta.cu_q_lens,
        meta.page_table,
        meta.kv_lens,
        q,
        kv_layer.k,
        kv_layer.v,
    )


def _precision(q: jax.Array) -> str:
    """Full precision for float32 (Triton's default there is tf32)."""
    return "ieee" if q.dtype == jnp.float32 else "tf32"


def _power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()
