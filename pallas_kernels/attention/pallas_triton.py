"""Attention on GPUs: two Pallas kernels for the Triton backend, both over the paged pool.

    decode    one token a row: (kv head, row, split of the context); a third kernel joins splits
    prefill   (tile of consecutive queries of one row, kv head), causal over prefix and new tokens

A mixed batch runs prefill on the rows from distribution[0] on and decode, into the same buffer, on
those before; nothing branches outside the kernels. All run in interpret mode on CPU.

No load or store is masked. Indices past an edge are clamped to it: a key past the context's end
reads the row's last key and its score is masked; a query (or query head) past the tile's end is a
copy of the last one, computes the same values and stores them to the same place. So nothing outside
the row's own tokens is ever read, and what a page holds beyond them does not matter.
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

from pallas_kernels.attention import pallas_triton_latent
from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.pallas_blocks import LOG2E, MASKED, dot, locate
from pallas_kernels.attention.tuning import block_sizes
from pallas_kernels.float8 import loaded

Sizes = Callable[..., dict[str, int]]  # as tuning.block_sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """What both kernels know when they are traced."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool  # heads have one; their logits [H] are then an input of what normalises
    block: int  # tokens of a KV block, a power of two

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


def attention(
    q: jax.Array,  # [T, H, D]
    kv_layer: KVLayer,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
    sizes: Sizes = block_sizes,
    out: jax.Array | None = None,
    shorter_than: int | None = None,
) -> jax.Array:
    """Attention of a ragged batch over a split pool, or, in kernels of its own, over a latent one.
    Returns [T, H, D of values] in q's dtype.

    Sums are float32, and float32 inputs are multiplied in full precision, not tf32.

    Args:
        interpret: run the kernels' code on CPU.
        sizes: where block sizes come from.
        out: of ragged rows, a result that has the rows of at least `shorter_than` new tokens
            filled in already, and 0 for padding.
    """
    if kv_layer.value_dim is not None:
        if window is not None or soft_cap is not None or sinks is not None:
            raise NotImplementedError("the latent kernel has no window, soft cap or sinks")
        how = {"scale": scale, "interpret": interpret, "sizes": sizes}
        return pallas_triton_latent.attention(q, kv_layer, meta, **how)
    if kv_layer.v is None:
        raise NotImplementedError("pallas_triton reads the split and the latent KV layout only")
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, pool_dim = kv_layer.k.shape
    if head_dim < 16 or pool_dim != head_dim:
        raise NotImplementedError(
            f"pallas_triton needs head_dim ≥ 16, the pool's own: {head_dim=} {pool_dim=}"
        )
    logits = () if sinks is None else (sinks.astype(jnp.float32),)
    spec = Spec(
        heads, kv_heads, head_dim, page_size, scale, window, soft_cap, sinks=bool(logits), block=0
    )
    if meta.max_q_len == 1 and tokens == meta.kv_lens.shape[0]:
        return _decode(None, q, kv_layer, logits, meta, spec, sizes, interpret)
    out = jnp.zeros_like(q) if out is None else out
    if meta.max_q_len is None:
        out = _prefill(out, q, kv_layer, logits, meta, spec, sizes, interpret, shorter_than)
    return _decode(out, q, kv_layer, logits, meta, spec, sizes, interpret)


def _decode(
    out: jax.Array | None,
    q: jax.Array,
    kv_layer: KVLayer,
    sinks: tuple[jax.Array, ...],  # [H], if any
    meta: AttentionMeta,
    spec: Spec,
    sizes: Sizes,
    interpret: bool,
) -> jax.Array:
    """`out` [T, H, D] with row r's attention at token r for the decode rows. Without `out` every
    token is a row, and those of padding rows are 0.
    """
    rows = meta.kv_lens.shape[0]
    tuned = sizes("pallas_triton.decode", programs=rows * spec.kv_heads)
    spec = _sized(spec, q.dtype, tuned["block"])
    splits = min(tuned["splits"], pl.cdiv(meta.page_table.shape[1] * spec.page_size, spec.block))
    serve = {"splits": splits, "last_row": int(meta.max_q_len == 1), "every_row": out is None}
    kernel = functools.partial(_decode_kernel, spec=spec, **serve)
    params = plgpu.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"])
    grid = (spec.kv_heads, rows, splits)
    inputs = (meta.distribution, kv_layer.first_page.reshape(1), meta.page_table, meta.kv_lens, q)
    inputs = (*inputs, *_slots(kv_layer))
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    before = () if out is None else (out,)
    if splits == 1:
        inputs = (*inputs, *sinks)
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=result,
            input_output_aliases={len(inputs): 0} if before else {},
            compiler_params=params,
            interpret=interpret,
            name="flash_decode",
        )(*inputs, *before)
    each = (rows, splits, spec.heads)
    parts = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((*each, spec.head_dim), each, each)
        ),
        compiler_params=params,
        interpret=interpret,
        name="flash_decode",
    )(*inputs)
    inputs = (meta.distribution, *parts, *sinks)
    return pl.pallas_call(
        functools.partial(_join_kernel, spec=spec, **serve),
        grid=(spec.heads, rows),
        out_shape=result,
        input_output_aliases={len(inputs): 0} if before else {},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )(*inputs, *before)


def _decode_kernel(
    distribution_ref: Any,  # [2]
    first_page_ref: Any,  # [1]
    table_ref: Any,  # [R, P]
    kv_lens_ref: Any,  # [R]
    q_ref: Any,  # [T, H, D]
    k_ref: Any,  # [slots, K, D]
    v_ref: Any,
    # one split: sinks [H] if any, and out [T, H, D], twice if aliased; else [R, splits, H, D], and
    # maximum and total [R, splits, H]
    *refs: Any,
    spec: Spec,
    splits: int,
    last_row: int,  # index in distribution of the number of rows to serve
    every_row: bool,  # the others' results are 0; else they are left alone
) -> None:
    head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    arguments = (first_page_ref[0], table_ref, q_ref, k_ref, v_ref, refs, spec, splits)
    real = row < distribution_ref[last_row]
    kv_len = jnp.where(real, kv_lens_ref[row], 0)
    if every_row:
        _decode_split(head, row, split, kv_len, *arguments)
    else:
        pl.when(real)(lambda: _decode_split(head, row, split, kv_len, *arguments))


def _decode_split(
    head: jax.Array,
    row: jax.Array,
    split: jax.Array,
    kv_len: jax.Array,
    first_page: jax.Array,
    table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    refs: tuple[Any, ...],
    spec: Spec,
    splits: int,
) -> None:
    begin = jnp.int32(0) if spec.window is None else jnp.maximum(kv_len - spec.window, 0)
    # Each split takes an equal run of whole blocks; late ones may have none.
    first = begin // spec.block
    last = pl.cdiv(kv_len, spec.block)
    per_split = pl.cdiv(last - first, splits)
    first = first + split * per_split
    last = jnp.minimum(first + per_split, last)

    padded = max(16, pl.next_power_of_2(spec.group))
    heads = head * spec.group + jnp.minimum(jnp.arange(padded), spec.group - 1)
    query = _load_rows(q_ref, (jnp.broadcast_to(row, heads.shape), heads), spec)  # [Gp, D]

    def one_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        position = i * spec.block + jnp.arange(spec.block)
        visible = (position >= begin) & (position < kv_len)
        index = jnp.clip(position, begin, kv_len - 1)
        keys, values = _load_block(k_ref, v_ref, table_ref, row, index, head, first_page, spec)
        return _accumulate(state, query, keys, values, visible[None, :], spec)

    weighted, maximum, total = lax.fori_loop(first, last, one_block, _empty(padded, spec))
    if splits == 1:
        total = _with_sink(total, maximum, refs[0][heads]) if spec.sinks else total
        result = weighted / jnp.maximum(total, 1e-30)[:, None]
        _store_rows(refs[-1], (jnp.broadcast_to(row, heads.shape), heads), result, spec)
        return
    at = (jnp.broadcast_to(row, heads.shape), jnp.broadcast_to(split, heads.shape), heads)
    _store_rows(refs[0], at, weighted, spec)
    refs[1][at] = maximum
    refs[2][at] = total


def _join_kernel(
    distribution_ref: Any,  # [2]
    weighted_ref: Any,  # [R, splits, H, D]
    maximum_ref: Any,  # [R, splits, H]
    total_ref: Any,
    *refs: Any,  # sinks [H] if any; out [T, H, D], twice if aliased
    spec: Spec,
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
        largest = jnp.max(maximum, axis=0)
        share = jnp.where(lane < splits, jnp.exp2(maximum - largest), 0.0)
        total = jnp.sum(total_ref[at] * share, axis=0)
        total = _with_sink(total, largest, refs[0][head]) if spec.sinks else total
        share /= jnp.maximum(total, 1e-30)
        result = jnp.sum(_load_rows(weighted_ref, at, spec) * share[:, None], axis=0)
        one = jnp.zeros((1,), jnp.int32)
        _store_rows(refs[-1], (one + row, one + head), result[None, :], spec)

    if every_row:
        join()
    else:
        pl.when(row < distribution_ref[last_row])(join)


def _prefill(
    out: jax.Array,
    q: jax.Array,
    kv_layer: KVLayer,
    sinks: tuple[jax.Array, ...],  # [H], if any
    meta: AttentionMeta,
    spec: Spec,
    sizes: Sizes,
    interpret: bool,
    shorter_than: int | None,
) -> jax.Array:
    """`out` [T, H, D] with the tokens of the rows from distribution[0] on filled in."""
    tuned = sizes("pallas_triton.prefill", head_dim=spec.head_dim)
    tokens, rows = q.shape[0], meta.kv_lens.shape[0]
    spec = _sized(spec, q.dtype, tuned["block"])
    padded = pl.next_power_of_2(spec.group)
    stacked = tuned["queries"] if q.dtype != jnp.float32 else min(tuned["queries"], 64)
    query_block = max(min(stacked // padded, pl.next_power_of_2(tokens)), pl.cdiv(16, padded))
    return pl.pallas_call(
        functools.partial(
            _prefill_kernel, spec=spec, query_block=query_block, shorter_than=shorter_than
        ),
        grid=(tokens // query_block + rows, spec.kv_heads),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={8 + len(sinks): 0},
        compiler_params=plgpu.CompilerParams(num_warps=tuned["warps"], num_stages=tuned["stages"]),
        interpret=interpret,
        name="ragged_prefill",
    )(
        kv_layer.first_page.reshape(1),
        meta.distribution,
        meta.cu_q_lens,
        meta.page_table,
        meta.kv_lens,
        q,
        *_slots(kv_layer),
        *sinks,
        out,
    )


def _prefill_kernel(
    first_page_ref: Any,  # [1]
    distribution_ref: Any,  # [2]
    cu_q_lens_ref: Any,  # [R + 1]
    table_ref: Any,  # [R, P]
    kv_lens_ref: Any,  # [R]
    q_ref: Any,  # [T, H, D]
    k_ref: Any,  # [slots, K, D]
    v_ref: Any,
    *refs: Any,  # sinks [H] if any; the buffer that out aliases, and out [T, H, D]
    spec: Spec,
    query_block: int,
    shorter_than: int | None,
) -> None:
    # The last tiles of a row are its longest: the first programs take them.
    tile, head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    row, offset = locate(cu_q_lens_ref, tile, query_block)
    start = cu_q_lens_ref[row]
    q_len = cu_q_lens_ref[row + 1] - start
    first_page = first_page_ref[0]

    served = (row >= distribution_ref[0]) & (row < distribution_ref[1]) & (offset < q_len)
    if shorter_than is not None:
        served &= q_len < shorter_than

    @pl.when(served)
    def _tile() -> None:
        kv_len = kv_lens_ref[row]
        padded = pl.next_power_of_2(spec.group)
        lane = jnp.arange(query_block * padded)
        query_index = jnp.minimum(offset + lane // padded, q_len - 1)
        heads = head * spec.group + jnp.minimum(lane % padded, spec.group - 1)
        at = (start + query_index, heads)
        query = _load_rows(q_ref, at, spec)  # [M, D]
        query_position = (kv_len - q_len + query_index)[:, None]
        position = kv_len - q_len + offset  # of the first query
        end = kv_len - q_len + jnp.minimum(offset + query_block, q_len)
        begin = jnp.int32(0)
        if spec.window is not None:
            begin = jnp.maximum(position - spec.window + 1, 0)

        def one_block(
            i: jax.Array, state: tuple[jax.Array, ...], *, masked: bool
        ) -> tuple[jax.Array, ...]:
            index = i * spec.block + jnp.arange(spec.block)
            visible = None
            if masked:
                visible = index[None, :] <= query_position
                if spec.window is not None:
                    visible &= index[None, :] > query_position - spec.window
                index = jnp.clip(index, begin, end - 1)
            keys, values = _load_block(k_ref, v_ref, table_ref, row, index, head, first_page, spec)
            return _accumulate(state, query, keys, values, visible, spec)

        state = _empty(query_block * padded, spec)
        first = begin // spec.block
        if spec.window is None:  # blocks that every query of the tile sees whole
            whole = (position + 1) // spec.block
            state = lax.fori_loop(first, whole, functools.partial(one_block, masked=False), state)
            first = whole
        weighted, maximum, total = lax.fori_loop(
            first, pl.cdiv(end, spec.block), functools.partial(one_block, masked=True), state
        )
        total = _with_sink(total, maximum, refs[0][heads]) if spec.sinks else total
        _store_rows(refs[-1], at, weighted / total[:, None], spec)


def _load_block(
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    row: jax.Array,
    index: jax.Array,  # [N] positions in the row's context
    head: jax.Array,
    first_page: jax.Array,
    spec: Spec,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [N, D] of one KV head."""
    page_size = jnp.int32(spec.page_size)
    column = lax.div(index, page_size)
    page = table_ref[jnp.broadcast_to(row, index.shape), column] + first_page
    slot = page * page_size + lax.rem(index, page_size)
    at = (slot, jnp.broadcast_to(head, slot.shape))
    return _load_rows(k_ref, at, spec), _load_rows(v_ref, at, spec)


def _accumulate(
    state: tuple[jax.Array, ...],
    query: jax.Array,  # [M, D]
    keys: jax.Array,  # [N, D]
    values: jax.Array,  # [N, D]
    visible: jax.Array | None,  # [M or 1, N]
    spec: Spec,
) -> tuple[jax.Array, ...]:
    """One step of the online softmax, in base 2."""
    weighted, maximum, total = state
    scores = dot(query, keys.astype(query.dtype).T)
    if spec.soft_cap is None:
        scores = scores * (spec.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_maximum[:, None])
    shrink = jnp.exp2(maximum - new_maximum)
    total = total * shrink + jnp.sum(weights, axis=1)
    values = values.astype(query.dtype)
    weighted = weighted * shrink[:, None] + dot(weights.astype(query.dtype), values)
    return weighted, new_maximum, total


def _with_sink(total: jax.Array, maximum: jax.Array, sink: jax.Array) -> jax.Array:
    """The weights' sum with that of a key of logit `sink` and no value. Where the sink outweighs
    all keys beyond float32 it is infinite, and the result 0 as it should be.
    """
    return total + jnp.exp2(sink * LOG2E - maximum)


def _empty(queries: int, spec: Spec) -> tuple[jax.Array, ...]:
    width = pl.next_power_of_2(spec.head_dim)
    return (
        jnp.zeros((queries, width), jnp.float32),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def _columns(at: tuple[jax.Array, ...], spec: Spec) -> tuple[Any, ...]:
    """Index of whole rows of head_dim; a width that is no power of two repeats its last column."""
    width = pl.next_power_of_2(spec.head_dim)
    if width == spec.head_dim:
        return (*at, slice(None))
    shape = (at[0].shape[0], width)
    column = jnp.minimum(jnp.arange(width), spec.head_dim - 1)
    return (
        *(jnp.broadcast_to(x[:, None], shape) for x in at),
        jnp.broadcast_to(column[None, :], shape),
    )


def _load_rows(ref: Any, at: tuple[jax.Array, ...], spec: Spec) -> jax.Array:
    rows = ref[_columns(at, spec)]
    if rows.dtype.itemsize == 1:
        rows = loaded(rows, jnp.bfloat16)
    if rows.shape[1] == spec.head_dim:
        return rows
    real = (jnp.arange(rows.shape[1]) < spec.head_dim)[None, :]
    return jnp.where(real, rows, jnp.zeros((), rows.dtype))


def _store_rows(ref: Any, at: tuple[jax.Array, ...], rows: jax.Array, spec: Spec) -> None:
    if rows.shape[1] != spec.head_dim:  # repeated columns must carry the last one's values
        last = jnp.arange(rows.shape[1]) == spec.head_dim - 1
        kept = jnp.arange(rows.shape[1]) < spec.head_dim
        edge = jnp.sum(jnp.where(last[None, :], rows, 0.0), axis=1)
        rows = jnp.where(kept[None, :], rows, edge[:, None])
    ref[_columns(at, spec)] = rows.astype(ref.dtype)


def _slots(kv_layer: KVLayer) -> tuple[jax.Array, jax.Array]:
    """The pool as [slots, K, D]."""
    assert kv_layer.v is not None
    shape = (-1, *kv_layer.k.shape[2:])
    return kv_layer.k.reshape(shape), kv_layer.v.reshape(shape)


def _sized(spec: Spec, dtype: jnp.dtype, block: int) -> Spec:
    """Spec with its KV block: float32 takes half, for shared memory."""
    return dataclasses.replace(spec, block=block if dtype != jnp.float32 else max(16, block // 2))
