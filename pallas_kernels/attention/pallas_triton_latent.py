"""Attention over a latent pool on GPUs: every query head reads the same key of a token, whose first
columns are its value. Pallas kernels for the Triton backend, as pallas_triton's.

    decode    one token a row: (block of heads, row, split of the context); a third kernel joins
    prefill   (block of heads, tile of consecutive queries of one row)

A block of keys is loaded once for scores and values alike, in two parts: the value's columns and
the rest, each a power of two. Programs of one row's blocks of heads are neighbours, so that the
cache serves all but the first. As in pallas_triton indices past an edge are clamped, and nothing
that a row does not own is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.pallas_blocks import LOG2E, MASKED, dot, locate
from pallas_kernels.attention.tuning import block_sizes

_HEADS = 16  # of a program, as the table of block sizes counts programs
Sizes = Callable[..., dict[str, int]]  # as tuning.block_sizes
State = tuple[jax.Array, jax.Array, jax.Array]  # weighted [M, V], maximum [M], total [M]


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """What the kernels know when they are traced."""

    heads: int
    value_dim: int
    page_size: int
    scale: float  # of scores in base 2
    block: int  # tokens of a KV block, a power of two
    head_block: int  # query heads of a program, a power of two

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.heads, self.head_block)


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Where a kernel finds the keys of one row."""

    k_ref: Any  # [L · pages, page, 1, D]
    table_ref: Any  # [R, P]
    first_page: jax.Array
    row: jax.Array


def attention(
    q: jax.Array,  # [T, H, D]
    kv_layer: KVLayer,
    meta: AttentionMeta,
    *,
    scale: float,
    interpret: bool = False,
    sizes: Sizes = block_sizes,
    out: jax.Array | None = None,
    shorter_than: int | None = None,
) -> jax.Array:
    """[T, H, value_dim] of a ragged batch, in q's dtype; sums are float32. `sizes`, `out` and
    `shorter_than` are as pallas_triton's.
    """
    (tokens, heads, head_dim), rows = q.shape, meta.kv_lens.shape[0]
    value_dim, page_size = kv_layer.value_dim, kv_layer.k.shape[1]
    assert value_dim is not None, f"{kv_layer=}"
    parts = (value_dim, head_dim - value_dim)
    if kv_layer.k.shape[3] != head_dim or any(n < 16 or n & (n - 1) for n in parts):
        raise NotImplementedError(
            "the latent kernel needs parts of a power of two ≥ 16 and the pool's own head_dim: "
            f"{parts=} {kv_layer.k.shape=}"
        )
    spec = Spec(heads, value_dim, page_size, scale * LOG2E, block=0, head_block=0)
    if meta.max_q_len == 1 and tokens == rows:
        return _decode(None, q, kv_layer, meta, spec, sizes, interpret)
    out = jnp.zeros((tokens, heads, value_dim), q.dtype) if out is None else out
    if meta.max_q_len is None and shorter_than != 1:
        out = _prefill(out, q, kv_layer, meta, spec, sizes, interpret, shorter_than)
    return _decode(out, q, kv_layer, meta, spec, sizes, interpret)


def _decode(
    out: jax.Array | None,
    q: jax.Array,
    kv_layer: KVLayer,
    meta: AttentionMeta,
    spec: Spec,
    sizes: Sizes,
    interpret: bool,
) -> jax.Array:
    """`out` [T, H, V] with row r's attention at token r for the decode rows. Without `out` every
    token is a row, and those of padding rows are 0.
    """
    rows = meta.kv_lens.shape[0]
    programs = rows * pl.cdiv(spec.heads, _HEADS)
    tuned = sizes("pallas_triton.latent_decode", programs=programs)
    spec = _sized(spec, q.dtype, tuned)
    splits = min(tuned["splits"], pl.cdiv(meta.page_table.shape[1] * spec.page_size, spec.block))
    serve = {"splits": splits, "last_row": int(meta.max_q_len == 1), "every_row": out is None}
    inputs = (meta.distribution, kv_layer.first_page.reshape(1), meta.page_table, meta.kv_lens)
    inputs, before = (*inputs, q, kv_layer.k), () if out is None else (out,)
    result = jax.ShapeDtypeStruct((*q.shape[:2], spec.value_dim), q.dtype)
    each = (rows, splits, spec.heads)
    parts = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*each, spec.value_dim), each, each)]
    joined = splits == 1
    found = pl.pallas_call(
        functools.partial(_decode_kernel, spec=spec, **serve),
        grid=(spec.head_blocks, rows, splits),
        out_shape=result if joined else tuple(parts),
        input_output_aliases={len(inputs): 0} if joined and before else {},
        compiler_params=plgpu.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"]),
        interpret=interpret,
        name="latent_decode",
    )(*inputs, *(before if joined else ()))
    if joined:
        return found
    return pl.pallas_call(
        functools.partial(_join_kernel, **serve),
        grid=(spec.heads, rows),
        out_shape=result,
        input_output_aliases={4: 0} if before else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="join_latent_splits",
    )(meta.distribution, *found, *before)


def _decode_kernel(
    distribution_ref: Any,  # [2]
    first_page_ref: Any,  # [1]
    table_ref: Any,  # [R, P]
    kv_lens_ref: Any,  # [R]
    q_ref: Any,  # [T, H, D]
    k_ref: Any,  # [L · pages, page, 1, D]
    # one split: out [T, H, V], twice if aliased; else [R, splits, H, V], and maximum and total
    # [R, splits, H]
    *out_refs: Any,
    spec: Spec,
    splits: int,
    last_row: int,  # index in distribution of the number of rows to serve
    every_row: bool,  # the others' results are 0; else they are left alone
) -> None:
    head_block, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    real = row < distribution_ref[last_row]
    kv_len = jnp.where(real, kv_lens_ref[row], 0)
    pool = Pool(k_ref, table_ref, first_page_ref[0], row)

    def serve() -> None:
        # Each split takes an equal run of whole blocks; late ones may have none.
        per_split = pl.cdiv(pl.cdiv(kv_len, spec.block), splits)
        first = split * per_split
        last = jnp.minimum(first + per_split, pl.cdiv(kv_len, spec.block))
        lane = jnp.arange(max(16, spec.head_block)) % spec.head_block
        head = jnp.minimum(head_block * spec.head_block + lane, spec.heads - 1)
        at = jnp.broadcast_to(row, head.shape)
        query = _query(q_ref, at, head, spec)
        state = _empty(head.shape[0], spec)
        limit = jnp.broadcast_to(kv_len - 1, head.shape)
        weighted, maximum, total = _over_blocks(
            state, query, first, last, pool, limit, kv_len, spec
        )
        if splits == 1:
            result = weighted / jnp.maximum(total, 1e-30)[:, None]
            out_refs[-1][at, head, :] = result.astype(out_refs[-1].dtype)
            return
        at = (at, jnp.broadcast_to(split, head.shape), head)
        out_refs[0][(*at, slice(None))] = weighted
        out_refs[1][at] = maximum
        out_refs[2][at] = total

    if every_row:
        serve()
    else:
        pl.when(real)(serve)


def _join_kernel(
    distribution_ref: Any,  # [2]
    weighted_ref: Any,  # [R, splits, H, V]
    maximum_ref: Any,  # [R, splits, H]
    total_ref: Any,
    *out_refs: Any,  # [T, H, V], twice if aliased
    splits: int,
    last_row: int,
    every_row: bool,
) -> None:
    """One head of one row: its splits' partial softmaxes as one."""
    head, row = pl.program_id(0), pl.program_id(1)

    def join() -> None:
        lane = jnp.arange(pl.next_power_of_2(splits))
        split = jnp.minimum(lane, splits - 1)
        at = (jnp.broadcast_to(row, split.shape), split, jnp.broadcast_to(head, split.shape))
        maximum = maximum_ref[at]
        share = jnp.where(lane < splits, jnp.exp2(maximum - jnp.max(maximum, axis=0)), 0.0)
        share /= jnp.maximum(jnp.sum(total_ref[at] * share, axis=0), 1e-30)
        result = jnp.sum(weighted_ref[(*at, slice(None))] * share[:, None], axis=0)
        one = jnp.zeros((1,), jnp.int32)
        out_refs[-1][one + row, one + head, :] = result[None, :].astype(out_refs[-1].dtype)

    if every_row:
        join()
    else:
        pl.when(row < distribution_ref[last_row])(join)


def _prefill(
    out: jax.Array,
    q: jax.Array,
    kv_layer: KVLayer,
    meta: AttentionMeta,
    spec: Spec,
    sizes: Sizes,
    interpret: bool,
    shorter_than: int | None,
) -> jax.Array:
    """`out` [T, H, V] with the tokens of the rows from distribution[0] on filled in."""
    tuned = sizes("pallas_triton.latent_prefill")
    tokens, rows = q.shape[0], meta.kv_lens.shape[0]
    spec = _sized(spec, q.dtype, tuned)
    stacked = tuned["queries"] if q.dtype != jnp.float32 else min(tuned["queries"], 32)
    query_block = min(max(stacked // spec.head_block, 1), pl.next_power_of_2(tokens))
    query_block = max(query_block, pl.cdiv(16, spec.head_block))
    inputs = (kv_layer.first_page.reshape(1), meta.distribution, meta.cu_q_lens, meta.page_table)
    inputs = (*inputs, meta.kv_lens, q, kv_layer.k)
    return pl.pallas_call(
        functools.partial(
            _prefill_kernel, spec=spec, query_block=query_block, shorter_than=shorter_than
        ),
        grid=(spec.head_blocks, tokens // query_block + rows),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(inputs): 0},
        compiler_params=plgpu.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"]),
        interpret=interpret,
        name="latent_prefill",
    )(*inputs, out)


def _prefill_kernel(
    first_page_ref: Any,  # [1]
    distribution_ref: Any,  # [2]
    cu_q_lens_ref: Any,  # [R + 1]
    table_ref: Any,  # [R, P]
    kv_lens_ref: Any,  # [R]
    q_ref: Any,  # [T, H, D]
    k_ref: Any,  # [L · pages, page, 1, D]
    _: Any,  # the buffer that out_ref aliases
    out_ref: Any,  # [T, H, V]
    *,
    spec: Spec,
    query_block: int,
    shorter_than: int | None,
) -> None:
    # The last tiles of a row are its longest: the first programs take them.
    head_block, tile = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    row, offset = locate(cu_q_lens_ref, tile, query_block)
    start = cu_q_lens_ref[row]
    q_len = cu_q_lens_ref[row + 1] - start
    pool = Pool(k_ref, table_ref, first_page_ref[0], row)
    served = (row >= distribution_ref[0]) & (row < distribution_ref[1]) & (offset < q_len)
    if shorter_than is not None:
        served &= q_len < shorter_than

    @pl.when(served)
    def _tile() -> None:
        before = kv_lens_ref[row] - q_len
        lane = jnp.arange(query_block * spec.head_block)
        index = jnp.minimum(offset + lane // spec.head_block, q_len - 1)
        head = head_block * spec.head_block + lane % spec.head_block
        head = jnp.minimum(head, spec.heads - 1)
        query = _query(q_ref, start + index, head, spec)  # [M, ·]
        end = before + jnp.minimum(offset + query_block, q_len)
        whole = (before + offset + 1) // spec.block  # blocks that every query of the tile sees
        state = _empty(lane.shape[0], spec)
        state = _over_blocks(state, query, jnp.int32(0), whole, pool, None, end, spec)
        last = pl.cdiv(end, spec.block)
        weighted, _, total = _over_blocks(
            state, query, whole, last, pool, before + index, end, spec
        )
        result = weighted / total[:, None]
        out_ref[start + index, head, :] = result.astype(out_ref.dtype)


def _query(q_ref: Any, token: jax.Array, head: jax.Array, spec: Spec) -> tuple[jax.Array, ...]:
    """Rows [M, V] and [M, D − V] of queries."""
    return (
        q_ref[token, head, slice(0, spec.value_dim)],
        q_ref[token, head, slice(spec.value_dim, q_ref.shape[2])],
    )


def _empty(queries: int, spec: Spec) -> State:
    return (
        jnp.zeros((queries, spec.value_dim), jnp.float32),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def _over_blocks(
    state: State,
    query: tuple[jax.Array, ...],
    first: jax.Array,
    last: jax.Array,
    pool: Pool,
    limit: jax.Array | None,  # [M] position of the last key that a query sees; None: sees all
    end: jax.Array,  # tokens that may be read of the row
    spec: Spec,
) -> State:
    """The online softmax, in base 2, over KV blocks `first` to `last`."""

    def one_block(i: jax.Array, state: State) -> State:
        weighted, maximum, total = state
        position = i * spec.block + jnp.arange(spec.block)
        latent, rest = _load(pool, jnp.minimum(position, end - 1), query[0].dtype, spec)
        scores = (dot(query[0], latent.T) + dot(query[1], rest.T)) * spec.scale
        if limit is not None:
            scores = jnp.where(position[None, :] <= limit[:, None], scores, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        shrink = jnp.exp2(maximum - new_maximum)
        total = total * shrink + jnp.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + dot(weights.astype(latent.dtype), latent)
        return weighted, new_maximum, total

    return lax.fori_loop(first, last, one_block, state)


def _load(
    pool: Pool, index: jax.Array, dtype: jnp.dtype, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """The parts [N, V] and [N, D − V] of the keys at positions `index` [N] of the row."""
    page_size = jnp.int32(spec.page_size)
    page = pool.table_ref[jnp.broadcast_to(pool.row, index.shape), lax.div(index, page_size)]
    at = (page + pool.first_page, lax.rem(index, page_size), jnp.zeros_like(index))
    latent = pool.k_ref[(*at, slice(0, spec.value_dim))]
    rest = pool.k_ref[(*at, slice(spec.value_dim, pool.k_ref.shape[3]))]
    return latent.astype(dtype), rest.astype(dtype)


def _sized(spec: Spec, dtype: jnp.dtype, tuned: dict[str, int]) -> Spec:
    """Spec with its blocks: float32 takes half of a KV block, for shared memory."""
    block = tuned["block"] if dtype != jnp.float32 else max(16, tuned["block"] // 2)
    head_block = min(tuned["heads"], pl.next_power_of_2(spec.heads))
    return dataclasses.replace(spec, block=block, head_block=head_block)
