"""Prefill attention over a latent pool for Hopper: warp-specialised (Pallas, Mosaic GPU backend).

A tile is ROWS stacked query heads: of consecutive queries of one row where they have fewer than
ROWS heads each, else of one query. mosaic_tiles deals tiles to the multiprocessors. There the third
warpgroup copies a tile's queries and pages to shared memory; the other two take the blocks of BLOCK
tokens in pairs. Each scores one block of the pair and leaves its weights for both, in the place of
the block's rotated columns, which are not needed any more; and each adds both blocks' weighted
values in its own half of the columns, because a multiprocessor's registers hold the sums of ROWS
heads but once. The second warpgroup weighs its block while it adds the first one's values. Source
of that split: FlashMLA (deepseek-ai, 2025).

Serves rows of at least a tile's queries: a tile that would reach past the row's end is moved back
to end there, and the queries that it then shares with the tile before get the same values twice.
Shorter rows are pallas_triton_latent's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import pallas_triton_latent
from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.mosaic_tiles import LEAST_TOKENS, dealt, num_dealt, tile_table
from pallas_kernels.attention.pallas_blocks import LOG2E, MASKED

ROWS = 64  # query heads of a tile
BLOCK = 64  # tokens
VALUE_DIM, REST_DIM = 512, 64  # columns of a key: its value's and the rotated ones
HALF = VALUE_DIM // 2  # columns that one warpgroup sums
LEFT, RIGHT, REST = range(3)  # parts of a block's columns, copied one after the other
#: Before jax 0.12 a load names an index beside the reference.
WHOLE: Any = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage] -- public, but not re-exported


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
    """pallas_triton_latent's attention, with the longer rows of a ragged batch computed here.

    Raises NotImplementedError for what needs another kernel: other chips than Hopper's, types but
    bfloat16, other latents than DeepSeek's, heads that tiles do not divide, windows, caps, sinks.
    """
    if window is not None or soft_cap is not None or sinks is not None:
        raise NotImplementedError("mosaic_gpu_latent has no window, soft cap or sinks")
    device, (tokens, heads, head_dim) = jax.devices()[0], q.shape
    page_size, value_dim = kv_layer.k.shape[1], kv_layer.value_dim
    if device.platform != "gpu" or device.compute_capability != "9.0":
        raise NotImplementedError(f"mosaic_gpu_latent needs a Hopper GPU, not {device.device_kind}")
    if not q.dtype == kv_layer.k.dtype == jnp.bfloat16:
        raise NotImplementedError(
            f"mosaic_gpu_latent needs bfloat16, not {q.dtype}, {kv_layer.k.dtype}"
        )
    if (value_dim, head_dim, kv_layer.k.shape[3]) != (VALUE_DIM, *[VALUE_DIM + REST_DIM] * 2):
        raise NotImplementedError(f"mosaic_gpu_latent has no latents of {value_dim=} {head_dim=}")
    if heads % 8 or (ROWS % heads and heads % ROWS) or page_size not in (8, 16, 32, 64):
        raise NotImplementedError(f"mosaic_gpu_latent cannot tile latents of {heads=} {page_size=}")
    if meta.max_q_len == 1 or tokens < LEAST_TOKENS:
        return pallas_triton_latent.attention(q, kv_layer, meta, scale=scale)
    out = prefill(q, kv_layer, meta, scale=scale, processors=device.core_count)
    shorter_than = queries_of_a_tile(heads)
    return pallas_triton_latent.attention(
        q, kv_layer, meta, scale=scale, out=out, shorter_than=shorter_than
    )


def queries_of_a_tile(heads: int) -> int:
    return max(1, ROWS // heads)


def prefill(
    q: jax.Array,  # [T, H, D]
    kv_layer: KVLayer,
    meta: AttentionMeta,
    *,
    scale: float,
    processors: int,
) -> jax.Array:
    """[T, H, VALUE_DIM]: the rows of at least a tile's queries, and 0 for padding tokens."""
    (tokens, heads, head_dim), page_size = q.shape, kv_layer.k.shape[1]
    queries = queries_of_a_tile(heads)
    most_rows = min(meta.kv_lens.shape[0], tokens // queries)
    num_tiles = (tokens + most_rows * (queries - 1)) // queries
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    pages = BLOCK // page_size

    def columns(*shape: int) -> Any:
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    run = plgpu.kernel(
        functools.partial(
            _kernel, scale=scale, queries=queries, tiles_of_a_query=max(1, heads // ROWS),
            heads=heads, page_size=page_size, processors=processors,
        ),
        out_type=jax.ShapeDtypeStruct((tokens * heads, VALUE_DIM), q.dtype),
        grid=(processors,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            columns(2, ROWS, HALF),
            columns(1, ROWS, REST_DIM),
            columns(2, 2, BLOCK, HALF),
            columns(2, BLOCK, REST_DIM),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=pages, num_barriers=6),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_latent_prefill",
    )  # fmt: skip
    tiles = tile_table(meta, kv_layer.first_page, num_tiles, queries=queries, least=queries)
    out = run(tiles, meta.page_table, q.reshape(tokens * heads, head_dim), kv_layer.k)
    return out.reshape(tokens, heads, VALUE_DIM)


def _kernel(
    tiles_ref: Any,  # [tiles, 8]
    table_ref: Any,  # [R, P]
    q_ref: Any,  # [T · H, D]
    k_ref: Any,  # [pages, page, 1, D]
    out_ref: Any,  # [T · H, VALUE_DIM]
    q_smem: Any,  # [2, ROWS, HALF] queries, later the result
    q_rest_smem: Any,  # [1, ROWS, REST_DIM]
    k_smem: Any,  # [2, 2, BLOCK, HALF]
    k_rest_smem: Any,  # [2, BLOCK, REST_DIM] later the block's weights [2, ROWS, BLOCK]
    maxima_smem: Any,  # [2, ROWS] after each block of the pair
    totals_smem: Any,  # [2, ROWS] of the weights of one warpgroup's blocks
    q_ready: Any,
    q_free: Any,
    k_ready: Any,  # [2 · 3] each block's parts
    k_free: Any,  # [2 · 2] each block's halves
    weights_ready: Any,  # [2]
    totals_ready: Any,
    *,
    scale: float,
    queries: int,
    tiles_of_a_query: int,
    heads: int,
    page_size: int,
    processors: int,
) -> None:
    num_tiles, processor = tiles_ref[0, 6], lax.axis_index("processor")
    warpgroup = lax.axis_index("warpgroup")
    num_own = num_dealt(num_tiles * tiles_of_a_query, processor, processors)

    def extent(index: jax.Array) -> tuple[jax.Array, ...]:
        """Row, its context, position of the first query in it, first row of q_ref, and pairs of
        blocks of this processor's tile `index`. Tiles of one query are neighbours.
        """
        number = dealt(index, processor, processors)
        tile = lax.div(number, jnp.int32(tiles_of_a_query))
        row, offset, start, q_len, kv_len = (tiles_ref[tile, c] for c in range(5))
        own = jnp.minimum(offset, q_len - queries)
        position = kv_len - q_len + own
        first = (start + own) * heads + (number - tile * tiles_of_a_query) * ROWS
        pairs = lax.div(position + (queries + 2 * BLOCK - 1), jnp.int32(2 * BLOCK))
        return row, kv_len, position, pl.multiple_of(first, 8), pairs

    def compute(warpgroup: int) -> None:  # the two are programs of their own
        plgpu.set_max_registers(232, action="increase")

        def one_tile(index: jax.Array, _: None) -> None:
            kv_len, position, first, pairs = extent(index)[1:]
            plgpu.barrier_wait(q_ready)
            result = _attend_half(
                q_smem, q_rest_smem, k_smem, k_rest_smem, maxima_smem, totals_smem,
                k_ready, k_free, weights_ready, totals_ready,
                warpgroup=warpgroup, position=position, kv_len=kv_len, pairs=pairs,
                factor=scale * LOG2E, stacked=ROWS // queries,
            )  # fmt: skip
            at = (pl.ds(first, ROWS), pl.ds(warpgroup * HALF, HALF))
            # Both warpgroups have read the queries for the last time.
            mine = q_smem.at[warpgroup]
            mine[...] = result.astype(mine.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, out_ref.at[at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_free)

        lax.fori_loop(0, num_own, one_tile, None)
        # The queries' place is free now.
        _clear_padding(
            out_ref, q_smem.at[warpgroup], tiles_ref[0, 7] * heads, min(heads, ROWS),
            pl.ds(warpgroup * HALF, HALF), processor, processors,
        )  # fmt: skip
        plgpu.wait_smem_to_gmem(0)

    for w in range(2):
        pl.when(warpgroup == w)(functools.partial(compute, w))

    @pl.when(warpgroup == 2)
    def _copy() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def copy_queries(index: jax.Array, first: jax.Array) -> None:
            @pl.when(index > 0)
            def _wait() -> None:
                plgpu.barrier_wait(q_free)

            rows = pl.ds(first, ROWS)
            for part, target in enumerate((q_smem.at[LEFT], q_smem.at[RIGHT], q_rest_smem.at[0])):
                source = q_ref.at[rows, pl.ds(part * HALF, target.shape[-1])]
                plgpu.copy_gmem_to_smem(source, target, q_ready)

        def one_tile(index: jax.Array, step: jax.Array) -> jax.Array:
            row, kv_len, _, first, pairs = extent(index)
            last_page, first_page = lax.div(kv_len - 1, jnp.int32(page_size)), tiles_ref[0, 5]

            def one_pair(i: jax.Array, zero: jax.Array) -> jax.Array:
                pages = 2 * BLOCK // page_size
                numbers = [  # all read before the first wait
                    table_ref[row, jnp.minimum(i * pages + p, last_page)] + first_page
                    for p in range(pages)
                ]
                for block in range(2):
                    own = numbers[block * pages // 2 : (block + 1) * pages // 2]
                    for part in (LEFT, RIGHT, REST):
                        if part != REST:
                            # The rest is free with both halves.
                            @pl.when(step + i > 0)
                            def _wait(barrier: Any = k_free.at[2 * block + part]) -> None:
                                plgpu.barrier_wait(barrier)

                            target = k_smem.at[zero + block, part]
                        else:
                            target = k_rest_smem.at[zero + block]
                        columns = pl.ds(part * HALF, REST_DIM if part == REST else HALF)
                        for p, page in enumerate(own):
                            plgpu.copy_gmem_to_smem(
                                k_ref.at[page, :, 0, columns],
                                target.at[pl.ds(p * page_size, page_size)],
                                k_ready.at[3 * block + part],
                            )
                # Later than the pair, which need not wait for the tile before.
                pl.when(i == 0)(functools.partial(copy_queries, index, first))
                return jnp.minimum(zero, i)

            lax.fori_loop(0, pairs, one_pair, _unknown_zero(kv_len))
            return step + pairs

        steps = lax.fori_loop(0, num_own, one_tile, processor * 0)

        @pl.when(steps > 0)
        def _drain() -> None:  # a barrier ends with every phase of it seen
            plgpu.barrier_wait(q_free)
            for half in range(4):
                plgpu.barrier_wait(k_free.at[half])


def _clear_padding(
    out_ref: Any,
    smem: Any,  # [ROWS, columns]
    begin: jax.Array,  # first row to clear; the rest is whole groups
    group: int,  # rows
    columns: Any,
    processor: jax.Array,
    processors: int,
) -> None:
    smem[...] = plgpu.layout_cast(jnp.zeros(smem.shape, smem.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()

    @pl.loop(processor, lax.div(out_ref.shape[0] - begin, jnp.int32(group)), step=processors)
    def _group(i: jax.Array) -> None:
        rows = pl.ds(pl.multiple_of(begin + i * group, 8), group)
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, group)], out_ref.at[rows, columns])


def _unknown_zero(kv_len: jax.Array) -> jax.Array:
    """0, which the compiler cannot tell. A loop that carries it into its buffers' indices computes
    their addresses as it goes; without, all are computed ahead, and spilled to memory: 704 µs in
    place of 438 for 8 prompts of 1,024 tokens and 16 heads on an H200.
    """
    return lax.div(kv_len, jnp.int32(1 << 30))


def _attend_half(
    q_smem: Any,
    q_rest_smem: Any,
    k_smem: Any,
    k_rest_smem: Any,
    maxima_smem: Any,
    totals_smem: Any,
    k_ready: Any,
    k_free: Any,
    weights_ready: Any,
    totals_ready: Any,
    *,
    warpgroup: int,
    position: jax.Array,  # of the first query in the row's context
    kv_len: jax.Array,
    pairs: jax.Array,
    factor: float,  # of scores, in base 2
    stacked: int,  # heads of one query in the tile
) -> jax.Array:
    """[ROWS, HALF] float32: the tile's result in the warpgroup's columns."""
    layout, reduced = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)

    def score(zero: jax.Array, scores_ref: Any) -> jax.Array:
        own = zero + warpgroup
        queries = (q_smem.at[zero + LEFT], q_smem.at[zero + RIGHT], q_rest_smem.at[zero])
        for part, query in enumerate(queries):
            keys = k_rest_smem.at[own] if part == REST else k_smem.at[own, part]
            plgpu.barrier_wait(k_ready.at[3 * warpgroup + part])
            plgpu.wgmma(scores_ref, query, keys.transpose((1, 0)))
        return scores_ref[...]

    def clear_foreign(values: Any, begin: jax.Array) -> None:
        """Only tokens before kv_len are the row's; others may hold NaN, and 0 · NaN is NaN."""
        shape = (BLOCK, BLOCK)
        for part in range(HALF // BLOCK):
            some = values.at[:, pl.ds(part * BLOCK, BLOCK)]
            index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + begin
            found = _load(some, layout)
            some[...] = jnp.where(index < kv_len, found, jnp.zeros((), found.dtype))
        plgpu.commit_smem()

    def add_values(
        acc_ref: Any,
        block: int,
        zero: jax.Array,
        begin: jax.Array,
        shrink: jax.Array,
        masked: bool,
    ) -> None:
        """Begins a block's; `added` is when it is done."""
        values = k_smem.at[zero + block, warpgroup]
        if warpgroup != block:
            plgpu.barrier_wait(k_ready.at[3 * block + warpgroup])
        if masked:
            pl.when(begin + BLOCK > kv_len)(functools.partial(clear_foreign, values, begin))
        weighted = acc_ref[...]
        acc_ref[...] = weighted * lax.broadcast_in_dim(shrink, weighted.shape, [0])
        plgpu.wgmma(acc_ref, k_rest_smem.at[zero + block], values)

    def added(block: int) -> None:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(k_free.at[2 * block + warpgroup])

    def one_pair(
        acc_ref: Any, i: jax.Array, state: tuple[jax.Array, ...], masked: bool
    ) -> tuple[Any, ...]:
        maximum, total, zero = state
        begin = i * (2 * BLOCK)
        scores = pl.run_scoped(functools.partial(score, zero), ACC((ROWS, BLOCK), jnp.float32))
        if masked:
            shape = (ROWS, BLOCK)
            lane = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
            after = keys + (begin + warpgroup * BLOCK - position)  # the first query
            scores = jnp.where(after * stacked <= lane, scores, MASKED)
        largest = scores.max(axis=1) * factor

        def weigh(before: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = jnp.maximum(before, largest)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(own, scores.shape, [0]))
            k_rest_smem.at[warpgroup][...] = weights.astype(k_rest_smem.dtype)
            maxima_smem.at[warpgroup][...] = own
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[warpgroup])
            return own, weights.sum(axis=1)

        if warpgroup == 0:
            first, sums = weigh(maximum)
            plgpu.barrier_wait(weights_ready.at[0])
            shrink = jnp.exp2(maximum - first)
            add_values(acc_ref, 0, zero, begin, shrink, masked)
            total = total * shrink + sums
            added(0)
            plgpu.barrier_wait(weights_ready.at[1])
            second = _load(maxima_smem.at[1], reduced)
            shrink = jnp.exp2(first - second)
            total *= shrink
            add_values(acc_ref, 1, zero, begin + BLOCK, shrink, masked)
            added(1)
        else:
            plgpu.barrier_wait(weights_ready.at[0])
            first = _load(maxima_smem.at[0], reduced)
            shrink = jnp.exp2(maximum - first)
            add_values(acc_ref, 0, zero, begin, shrink, masked)
            second, sums = weigh(first)
            after_second = jnp.exp2(first - second)
            total = total * (shrink * after_second) + sums
            added(0)
            plgpu.barrier_wait(weights_ready.at[1])
            add_values(acc_ref, 1, zero, begin + BLOCK, after_second, masked)
            added(1)
        return second, total, jnp.minimum(zero, i)

    def whole_tile(acc_ref: Any) -> tuple[jax.Array, jax.Array]:
        state = (
            plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), reduced),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), reduced),
            _unknown_zero(kv_len),
        )
        # Pairs that every query of the tile sees whole need no mask.
        whole = lax.div(position + 1, jnp.int32(2 * BLOCK))
        run = functools.partial(one_pair, acc_ref)
        state = lax.fori_loop(0, whole, functools.partial(run, masked=False), state)
        _, total, _ = lax.fori_loop(whole, pairs, functools.partial(run, masked=True), state)
        return acc_ref[...], total

    weighted, total = pl.run_scoped(whole_tile, ACC((ROWS, HALF), jnp.float32))
    totals_smem.at[warpgroup][...] = total
    plgpu.barrier_arrive(totals_ready)
    plgpu.barrier_wait(totals_ready)
    total += _load(totals_smem.at[1 - warpgroup], reduced)
    return weighted / lax.broadcast_in_dim(total, weighted.shape, [0])


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, *WHOLE, layout=layout)
