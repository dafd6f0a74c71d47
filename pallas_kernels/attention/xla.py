"""Attention as plain XLA loops over blocks of the context: for CPUs, and the fallback on GPUs.

Both loops run an online softmax over KV blocks gathered page by page, and their trip counts depend
on the real rows' lengths, never on the width of the page table or of the bucket:

    decode rows   groups of rows × KV blocks up to the group's longest context
    other rows    tiles of consecutive queries of one row × KV blocks up to the tile's causal bound
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.float8 import loaded

#: Score of a masked key: finite, so that a block without visible keys yields no NaN.
MASKED = -1e30
#: Tokens of a KV block, in whole pages: the last is half empty on average, each ~10 µs on CPU.
DECODE_KV_BLOCK = 112
PREFILL_KV_BLOCK = 128
PREFILL_QUERY_BLOCK = 64
DECODE_GROUP, MIXED_DECODE_GROUP = 16, 8


class Softmax(NamedTuple):
    """Online softmax of queries [r, K, M, D]: running maximum, sum and weighted values."""

    maximum: jax.Array  # [r, K, M, 1]
    total: jax.Array  # [r, K, M, 1]
    weighted: jax.Array  # [r, K, M, D]


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Pool and rows, and how a score comes from a scaled query times a key."""

    kv_layer: KVLayer
    meta: AttentionMeta
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # float32 [K, G]


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
    """Attention of a ragged batch over a split or latent pool: [T, H, D of values] in q's dtype."""
    if kv_layer.v is None and kv_layer.value_dim is None:
        raise NotImplementedError("xla reads the split and the latent KV layout only")
    tokens, heads, head_dim = q.shape
    kv_heads = kv_layer.k.shape[2]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)
    context = Context(kv_layer, meta, window, soft_cap, sinks)
    decode_only = meta.max_q_len == 1
    group = min(DECODE_GROUP if decode_only else MIXED_DECODE_GROUP, tokens)
    query_block = min(PREFILL_QUERY_BLOCK, tokens)
    # Blocks of queries start anywhere, so that the last one may reach past T.
    spare = -tokens % group if decode_only else max(group, query_block)
    grouped = (q.astype(jnp.float32) * scale).reshape(tokens, kv_heads, -1, head_dim)
    grouped = jnp.pad(grouped, ((0, spare), (0, 0), (0, 0), (0, 0)))
    num_decode = meta.distribution[1 if decode_only else 0]
    out = _decode(grouped, context, num_decode, group)
    if not decode_only:
        out = _prefill(out, grouped, context, query_block)
    return out[:tokens].reshape(tokens, heads, -1)[..., : kv_layer.value_dim].astype(q.dtype)


def _decode(q: jax.Array, context: Context, num_decode: jax.Array, group: int) -> jax.Array:
    """Of q [T', K, G, D] the first `num_decode` rows' results (row r is token r), 0 elsewhere.

    Queries are block-diagonal, [H, K · D] with zeros at other KV heads: K times the arithmetic, but
    keys and values are used as they lie in the pool. Moving heads in front of tokens for a batched
    product costs more than that (1.8 → 1.3 ms a layer, 16 rows of 200 tokens, 3 KV heads).
    """
    meta, kv_heads, head_dim = context.meta, q.shape[1], q.shape[3]
    rows = meta.page_table.shape[0]

    def one_group(index: jax.Array, out: jax.Array) -> jax.Array:
        row = index * group + jnp.arange(group)
        real = row < num_decode
        row = jnp.minimum(row, rows - 1)
        kv_lens = jnp.where(real, meta.kv_lens[row], 0)
        queries = lax.dynamic_slice_in_dim(q, index * group, group)
        spread = jnp.einsum("rkgd,kj->rkgjd", queries, jnp.eye(kv_heads))
        spread = spread.reshape(group, -1, kv_heads * head_dim)  # [r, H, K · D]

        def score(keys: jax.Array) -> jax.Array:
            keys = keys.reshape(group, -1, kv_heads * head_dim)
            scores = jnp.einsum("rhx,rnx->rhn", spread, keys, precision="highest")
            return scores.reshape(*queries.shape[:3], -1)

        def weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
            weights = weights.reshape(group, -1, weights.shape[-1])
            values = values.reshape(group, -1, kv_heads * head_dim)
            added = jnp.einsum("rhn,rnx->rhx", weights, values, precision="highest")
            added = added.reshape(*queries.shape[:3], kv_heads, head_dim)
            return jnp.stack([added[:, head, :, head] for head in range(kv_heads)], axis=1)

        extent = meta.page_table[row], (kv_lens - 1)[:, None], kv_lens
        result = _over_blocks(queries, context, *extent, DECODE_KV_BLOCK, score, weigh)
        result = jnp.where(real[:, None, None, None], result, 0.0)
        return lax.dynamic_update_slice_in_dim(out, result, index * group, axis=0)

    out = jnp.zeros_like(q)
    if meta.max_q_len == 1 and q.shape[0] == group:
        return one_group(jnp.int32(0), out)
    return lax.fori_loop(0, (num_decode + group - 1) // group, one_group, out)


def _prefill(out: jax.Array, q: jax.Array, context: Context, query_block: int) -> jax.Array:
    """`out` [T', K, G, D] with the tokens of rows that are not decode rows filled in.

    Their queries are cut in tiles, numbered across rows: row r's end before tile `ends[r]`.
    """
    meta, (_, kv_heads, group, head_dim) = context.meta, q.shape
    row = jnp.arange(meta.kv_lens.shape[0])
    mixed = (row >= meta.distribution[0]) & (row < meta.distribution[1])
    q_lens = jnp.where(mixed, jnp.diff(meta.cu_q_lens), 0)
    num_tiles = (q_lens + query_block - 1) // query_block
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(ends <= index)
        offset = (index - (ends[row] - num_tiles[row])) * query_block
        start = meta.cu_q_lens[row] + offset
        position = meta.kv_lens[row] - q_lens[row] + offset  # of the tile's first query
        num_queries = jnp.minimum(q_lens[row] - offset, query_block)
        queries = lax.dynamic_slice_in_dim(q, start, query_block)
        queries = queries.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, head_dim)  # M = q · G

        def score(keys: jax.Array) -> jax.Array:
            return jnp.einsum("kmd,nkd->kmn", queries[0], keys[0], precision="highest")[None]

        def weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
            return jnp.einsum("kmn,nkd->kmd", weights[0], values[0], precision="highest")[None]

        positions = position + jnp.arange(query_block * group)[None, :] // group
        extent = meta.page_table[row][None, :], positions, (position + num_queries)[None]
        result = _over_blocks(queries, context, *extent, PREFILL_KV_BLOCK, score, weigh)
        result = result.reshape(kv_heads, query_block, group, head_dim).transpose(1, 0, 2, 3)
        real = jnp.arange(query_block) < num_queries
        before = lax.dynamic_slice_in_dim(out, start, query_block)
        result = jnp.where(real[:, None, None, None], result, before)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return lax.fori_loop(0, ends[-1], one_tile, out)


def _over_blocks(
    queries: jax.Array,  # [r, K, M, D]
    context: Context,
    pages: jax.Array,  # [r, P]
    positions: jax.Array,  # [r, M] or [r, 1]
    ends: jax.Array,  # [r] tokens that the row owns
    kv_block: int,
    score: Callable[[jax.Array], jax.Array],
    weigh: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[r, K, M, D]: each query over its row's context up to its own position.

    `score` multiplies the queries with a block's keys [r, n, K, D] → [r, K, M, n], `weigh` such
    weights with its values → [r, K, M, D].
    """
    page_size, window = context.kv_layer.k.shape[1], context.window
    block_pages = max(1, min(kv_block // page_size, pages.shape[1]))
    block = block_pages * page_size

    def one_block(i: jax.Array, state: Softmax) -> Softmax:
        keys, values = _gather(context.kv_layer, pages, i, block_pages)
        at = i * block + jnp.arange(block)[None, :]
        visible = at[:, None, :] <= positions[:, :, None]  # [r, M, n]
        # NOTE: slots that the row does not own may hold anything, and 0 · NaN is NaN.
        owned = at < ends[:, None]
        if window is not None:
            visible &= at[:, None, :] > positions[:, :, None] - window
            owned &= at > positions[:, :1] - window
        values = jnp.where(owned[:, :, None, None], values, 0.0)
        scores = score(keys)
        if context.soft_cap is not None:
            scores = context.soft_cap * jnp.tanh(scores / context.soft_cap)
        scores = jnp.where(visible[:, None], scores, MASKED)
        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - maximum), jnp.exp(state.maximum - maximum)
        total = state.total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return Softmax(maximum, total, state.weighted * shrink + weigh(weights, values))

    column = (*queries.shape[:-1], 1)
    state = Softmax(jnp.full(column, MASKED), jnp.zeros(column), jnp.zeros_like(queries))
    if context.sinks is not None:  # a key that was seen before all others, of value 0
        repeats = queries.shape[2] // context.sinks.shape[1]
        sinks = jnp.tile(context.sinks, (1, repeats))[None, :, :, None]
        state = Softmax(jnp.broadcast_to(sinks, column), jnp.ones(column), state.weighted)
    first = jnp.int32(0)
    if window is not None:
        starts = jnp.where(ends > 0, positions[:, 0] - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(jnp.min(starts), 0) // block
    state = lax.fori_loop(first, (jnp.max(ends) + block - 1) // block, one_block, state)
    return state.weighted / jnp.maximum(state.total, 1e-30)


def _gather(
    kv_layer: KVLayer, pages: jax.Array, block: jax.Array, block_pages: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [r, n, K, D] in float32, a latent as both; past the table its end repeats."""
    column = jnp.minimum(block * block_pages + jnp.arange(block_pages), pages.shape[1] - 1)
    taken = pages[:, column] + kv_layer.first_page

    def take(pool: jax.Array) -> jax.Array:
        flat = pool.reshape(pool.shape[0], -1)  # whole pages copy twice as fast as their slices
        rows = flat.at[taken].get(mode="clip")
        wide = loaded(rows, jnp.float32) if rows.dtype.itemsize == 1 else rows.astype(jnp.float32)
        return wide.reshape(len(pages), -1, *pool.shape[2:])

    keys = take(kv_layer.k)
    return keys, keys if kv_layer.v is None else take(kv_layer.v)
