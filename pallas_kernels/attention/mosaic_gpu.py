"""Prefill attention for Hopper: warp-specialised, over the paged pool (Pallas, Mosaic GPU backend).

A tile is TILE consecutive queries of one row and one query head; mosaic_tiles deals them to the
multiprocessors. There the third warpgroup copies pages to shared memory with the copy engine, ahead
into the next tile; the other two take half of a tile each, and one multiplies while the other does
its softmax. Source of that schedule: FlashAttention-3 (arXiv 2407.08608).

Serves rows of at least HALF new tokens: a half tile that would reach past the row's end is moved
back to end there, so that it never holds another row's queries and every store is whole. The
queries it then shares with the half before it get the same values twice. Shorter rows are
pallas_triton's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_latent, pallas_triton
from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.attention.mosaic_tiles import LEAST_TOKENS, dealt, num_dealt, tile_table
from pallas_kernels.attention.tuning import block_sizes

HALF = 64  # queries of one warpgroup
TILE = 2 * HALF
LOG2E = math.log2(math.e)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage] -- public, but not re-exported
MASKED = -1e30  # finite, so that a block without visible keys yields no NaN


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
    """pallas_triton's attention, with the longer rows of a ragged batch computed here, or, over a
    latent pool, by mosaic_gpu_latent.

    Raises NotImplementedError for what needs another kernel: other chips than Hopper's, types but
    bfloat16, head_dim but 64 or 128, pages that the copy engine's tiles of 8 tokens do not fit.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if kv_layer.value_dim is not None:
        return mosaic_gpu_latent.attention(q, kv_layer, meta, **how, sinks=sinks)
    device, page_size, head_dim = jax.devices()[0], kv_layer.k.shape[1], q.shape[2]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        raise NotImplementedError(f"mosaic_gpu needs a Hopper GPU, not {device.device_kind}")
    if not q.dtype == kv_layer.k.dtype == jnp.bfloat16:
        raise NotImplementedError(f"mosaic_gpu needs bfloat16: {q.dtype=} {kv_layer.k.dtype=}")
    if head_dim not in (64, 128) or page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(f"mosaic_gpu cannot tile {head_dim=} {page_size=}")
    if kv_layer.v is None or sinks is not None:
        raise NotImplementedError("mosaic_gpu has no fused layout and no sinks")
    if meta.max_q_len == 1 or q.shape[0] < LEAST_TOKENS:
        return pallas_triton.attention(q, kv_layer, meta, **how)
    out = prefill(q, kv_layer, meta, **how, **block_sizes("mosaic_gpu.prefill"))
    return pallas_triton.attention(q, kv_layer, meta, **how, out=out, shorter_than=HALF)


def prefill(
    q: jax.Array,  # [T, H, D]
    kv_layer: KVLayer,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block: int,
    stages: int,
) -> jax.Array:
    """[T, H, D]: the rows of at least HALF new tokens, and 0 elsewhere."""
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = kv_layer.k.shape
    # A row of n ≥ HALF tokens has ceil(n / TILE) ≤ n / HALF tiles.
    group, num_tiles = heads // kv_heads, tokens // HALF
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    pages = block // page_size
    processors = jax.devices()[0].core_count
    run = plgpu.kernel(
        functools.partial(
            _kernel, scale=scale, window=window, soft_cap=soft_cap, block=block, stages=stages,
            kv_heads=kv_heads, group=group, page_size=page_size, processors=processors,
        ),
        grid=(processors,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2, HALF, head_dim), jnp.bfloat16),
            plgpu.SMEM((2, HALF, head_dim), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((stages, block, head_dim), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((stages, block, head_dim), jnp.bfloat16, transforms=transforms),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
            plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_prefill",
    )  # fmt: skip
    target = jax.new_ref(jnp.zeros_like(q))
    run(
        tile_table(meta, kv_layer.first_page, num_tiles, queries=TILE, least=HALF),
        meta.page_table, q, kv_layer.k, kv_layer.v, target,
    )  # fmt: skip
    return jax.freeze(target)


def _kernel(
    tiles_ref: Any,  # [tiles, 8]
    table_ref: Any,  # [R, P]
    q_ref: Any,  # [T, H, D]
    k_ref: Any,  # [pages, page, K, D]
    v_ref: Any,
    out_ref: Any,  # [T, H, D]
    plain_smem: Any,  # [2, HALF, D] queries as they come, later the result
    q_smem: Any,  # [2, HALF, D]
    k_smem: Any,  # [stages, block, D]
    v_smem: Any,
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    turn: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block: int,
    stages: int,
    kv_heads: int,
    group: int,
    page_size: int,
    processors: int,
) -> None:
    num_tiles, processor = tiles_ref[0, 6], lax.axis_index("processor")
    warpgroup = lax.axis_index("warpgroup")
    heads = kv_heads * group
    num_own = num_dealt(num_tiles * heads, processor, processors)

    def extent(index: jax.Array) -> tuple[jax.Array, ...]:
        """KV head, query head, row, its first token, new tokens and context, first query, first
        and last KV block of this processor's tile `index`. Heads of one KV head are neighbours.
        """
        number = dealt(index, processor, processors)
        tile, head = lax.div(number, jnp.int32(heads)), lax.rem(number, jnp.int32(heads))
        kv_head = lax.div(head, jnp.int32(group))
        row, offset, start, q_len, kv_len = (tiles_ref[tile, c] for c in range(5))
        before = kv_len - q_len  # the row's tokens that were there
        first_block = tile * 0  # NOTE: the lowering cannot carry a literal into a scope
        if window is not None:  # of the tile's first query, which is the lower half's
            lowest = before + jnp.minimum(offset, q_len - HALF)
            first_block = lax.div(jnp.maximum(lowest - window + 1, 0), jnp.int32(block))
        end_block = _ceil_div(before + jnp.minimum(offset + TILE, q_len), block)
        return kv_head, head, row, start, q_len, kv_len, offset, first_block, end_block

    @pl.when(warpgroup < 2)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")

        def one_tile(index: jax.Array, step: jax.Array) -> jax.Array:
            _, head, _, start, q_len, kv_len, offset, first_block, end_block = extent(index)
            before = kv_len - q_len
            # Only these tokens' pages are the row's; others may hold NaN, and 0 · NaN is NaN.
            live = (jnp.int32(0) if window is None else before - window + 1, kv_len)
            own = jnp.minimum(offset + warpgroup * HALF, q_len - HALF)
            at = (pl.ds(start + own, HALF), head)
            # Rows begin anywhere, and the copy engine tiles what begins at a multiple of 8 only.
            plain, mine = plain_smem.at[warpgroup], q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[at], plain, q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])
            mine[...] = plgpu.load(plain, (), layout=plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            result = _attend_half(
                mine, k_smem, v_smem, k_ready, v_ready, k_free, v_free, turn,
                warpgroup=warpgroup, position=before + own, live=live, step=step,
                first_block=first_block, end_block=end_block,
                scale=scale, window=window, soft_cap=soft_cap, block=block, stages=stages,
            )  # fmt: skip
            plain[...] = result.astype(plain.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(plain, out_ref.at[at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return step + end_block - first_block

        lax.fori_loop(0, num_own, one_tile, processor * 0)

    @pl.when(warpgroup == 2)
    def _copy() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def one_tile(index: jax.Array, step: jax.Array) -> jax.Array:
            kv_head, _, row, _, _, kv_len, _, first_block, end_block = extent(index)
            last_page, first_page = lax.div(kv_len - 1, jnp.int32(page_size)), tiles_ref[0, 5]

            @pl.loop(first_block, end_block)
            def _block(i: jax.Array) -> None:
                now = step + i - first_block
                slot = lax.rem(now, jnp.int32(stages))
                for ready, free, source, target in (
                    (k_ready, k_free, k_ref, k_smem),
                    (v_ready, v_free, v_ref, v_smem),
                ):

                    @pl.when(now >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[slot])

                    for p in range(block // page_size):
                        column = jnp.minimum(i * (block // page_size) + p, last_page)
                        page = table_ref[row, column] + first_page
                        plgpu.copy_gmem_to_smem(
                            source.at[page, :, kv_head],
                            target.at[slot, pl.ds(p * page_size, page_size)],
                            ready.at[slot],
                        )

            return step + end_block - first_block

        lax.fori_loop(0, num_own, one_tile, processor * 0)


def _attend_half(
    query: Any,  # [HALF, D] in shared memory
    k_smem: Any,
    v_smem: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    turn: Any,
    *,
    warpgroup: jax.Array,
    position: jax.Array,  # of the first query in the row's context
    live: tuple[jax.Array, jax.Array],  # first token that any query of the row sees, and the end
    step: jax.Array,  # blocks that went through the pipeline before this tile's
    first_block: jax.Array,
    end_block: jax.Array,  # of the whole tile: both warpgroups take every block from the pipeline
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block: int,
    stages: int,
) -> jax.Array:
    """[HALF, D] float32."""
    head_dim = query.shape[1]
    own_end = jnp.minimum(_ceil_div(position + HALF, block), end_block)
    whole_end = jnp.maximum(lax.div(position + 1, jnp.int32(block)), first_block)
    # Blocks that all of the half's queries see whole need no mask.
    whole_end = first_block if window is not None else jnp.minimum(whole_end, own_end)

    def slot_of(i: jax.Array) -> jax.Array:
        return lax.rem(step + i - first_block, jnp.int32(stages))

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def one_block(i: jax.Array, state: tuple[jax.Array, ...], masked: bool) -> tuple[Any, ...]:
        weighted, maximum, total = state
        slot = slot_of(i)

        def multiply_keys(scores_ref: Any) -> jax.Array:
            plgpu.wgmma(scores_ref, query, k_smem.at[slot].transpose((1, 0)))
            take_turn()
            return scores_ref[...]

        scores = pl.run_scoped(multiply_keys, ACC((HALF, block), jnp.float32))
        plgpu.barrier_arrive(k_free.at[slot])
        if soft_cap is None:
            factor = scale * LOG2E
        else:
            scores, factor = jnp.tanh(scores * (scale / soft_cap)), soft_cap * LOG2E
        if masked:
            shape = (HALF, block)
            layout = plgpu.Layout.WGMMA
            queries = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + position
            keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + i * block
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            scores = jnp.where(visible, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
        shrink = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        weighted *= lax.broadcast_in_dim(shrink, weighted.shape, [0])
        total *= shrink
        narrow = weights.astype(query.dtype)
        total += weights.sum(axis=1)
        weighted, total, new_maximum, narrow = lax.optimization_barrier(
            (weighted, total, new_maximum, narrow)
        )
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_ready.at[slot])
        if masked:
            foreign = (i + 1) * block > live[1]
            if window is not None:
                foreign |= i * block < live[0]

            @pl.when(foreign)
            def _clear() -> None:
                for part in range(block // HALF):
                    rows = v_smem.at[slot, pl.ds(part * HALF, HALF)]
                    values = plgpu.load(rows, (), layout=plgpu.Layout.WGMMA)
                    index = plgpu.broadcasted_iota(
                        jnp.int32, (HALF, head_dim), 0, layout=plgpu.Layout.WGMMA
                    ) + (i * block + part * HALF)
                    owned = index < live[1]
                    if window is not None:
                        owned &= index >= live[0]
                    rows[...] = jnp.where(owned, values, jnp.zeros((), values.dtype))
                plgpu.commit_smem()

        plgpu.barrier_wait(turn)

        def add_values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, narrow, v_smem.at[slot])

            @pl.when(i + 1 < own_end)
            def _next() -> None:
                plgpu.barrier_wait(k_ready.at[slot_of(i + 1)])

        weighted = pl.run_state(add_values)(ACC.init(weighted))
        plgpu.barrier_arrive(v_free.at[slot])
        return weighted, new_maximum, total

    def pass_block(i: jax.Array, _: None) -> None:
        """The other warpgroup's block."""
        slot = slot_of(i)
        plgpu.barrier_wait(k_ready.at[slot])
        plgpu.barrier_arrive(k_free.at[slot])
        take_turn()
        plgpu.barrier_wait(v_ready.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        take_turn()

    reduced = plgpu.Layout.WGMMA.reduce(1)
    state = (
        plgpu.layout_cast(jnp.zeros((HALF, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((HALF,), MASKED, jnp.float32), reduced),
        plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), reduced),
    )
    plgpu.barrier_wait(k_ready.at[slot_of(first_block)])
    pl.when(warpgroup == 1)(take_turn)
    state = lax.fori_loop(first_block, whole_end, functools.partial(one_block, masked=False), state)
    state = lax.fori_loop(whole_end, own_end, functools.partial(one_block, masked=True), state)
    lax.fori_loop(own_end, end_block, pass_block, None)
    pl.when(warpgroup == 0)(take_turn)
    weighted, _, total = state
    return weighted / lax.broadcast_in_dim(total, weighted.shape, [0])


def _ceil_div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x + (y - 1), jnp.int32(y))
