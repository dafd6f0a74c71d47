"""The grouped matmul for Hopper where arithmetic is the time (Pallas, Mosaic GPU backend).

A tile is SHARE consecutive rows for each of two or three warpgroups, times `columns` columns of one
group's matrix, and each multiprocessor takes every n-th of them. There the last warpgroup copies
rows and matrix to shared memory with the copy engine, ahead into the next tile; each of the others
multiplies its share of the rows.

The copy engine wants rows from a multiple of ALIGN on, so a group's first tile may begin with rows
of the group before it: what they yield is not stored. A share of which all rows are stored goes out
by blocks, another one row by row, in powers of two. With a gate a tile has columns of both halves
of the matrix, as many of each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARE = 64  # rows of one warpgroup
ALIGN = 8  # rows
DEPTH = 64  # of one step
LEAST_ROWS = 64  # a group, on average; with fewer, reading the matrices is the time
#: Of float32; the backend has no logistic function, and an exact division is a dozen instructions.
GATES: Mapping[str | None, Callable[..., jax.Array]] = {
    None: lambda total: total,
    "silu": lambda gate, up: gate * lax.rsqrt(1.0 + jnp.exp(-gate)) ** 2 * up,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How many warpgroups multiply, how many steps are copied ahead, the registers of a thread that
    multiplies and of one that copies, and how many columns are stored at once by blocks: twice
    as many row by row, of 128 bytes or a multiple, where a copy may begin."""

    warpgroups: int
    stages: int
    registers: tuple[int, int]
    chunk: int

    @property
    def rows(self) -> int:
        return self.warpgroups * SHARE


PLAIN = Tile(warpgroups=2, stages=4, registers=(232, 40), chunk=64)
GATED = Tile(warpgroups=3, stages=3, registers=(160, 32), chunk=32)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage] -- public, but not re-exported


def matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # [G]
    *,
    out_dtype: jnp.dtype,
    gate: str | None = None,
) -> jax.Array:
    """[M, O], or [M, O / 2] with a gate.

    Raises NotImplementedError for what needs another kernel: other chips than Hopper's, types but
    bfloat16, few rows a group, sizes that the tiles do not divide, other gates.
    """
    device, (rows, width), (groups, _, out_width) = jax.devices()[0], x.shape, weights.shape
    if device.platform != "gpu" or device.compute_capability != "9.0":
        raise NotImplementedError(f"mosaic_gpu needs a Hopper GPU, not {device.device_kind}")
    if not x.dtype == weights.dtype == out_dtype == jnp.bfloat16:
        raise NotImplementedError(f"mosaic_gpu needs bfloat16: {x.dtype=} {weights.dtype=}")
    if gate not in GATES:
        raise NotImplementedError(f"mosaic_gpu has gates {', '.join(map(str, GATES))}, not {gate}")
    aligned = rows % ALIGN or width % DEPTH or out_width % (128 if gate is None else 256)
    if rows < max(_tile(gate).rows, LEAST_ROWS * groups) or aligned:
        raise NotImplementedError(f"mosaic_gpu cannot tile {rows=} {groups=} {width=} {out_width=}")
    return run(x, weights, group_sizes, gate=gate, processors=device.core_count)


def run(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    gate: str | None = None,
    processors: int,
    share_memory: Callable[..., Any] = plgpu.RefUnion,
) -> jax.Array:
    """As matmul, of sizes that fit. `share_memory`: of buffers that are used in turns, to both."""
    tile = _tile(gate)
    rows, parts = x.shape[0], 1 if gate is None else 2
    out_width = weights.shape[2] // parts
    columns = 256 // parts if weights.shape[2] % 256 == 0 else 128
    transforms = (plgpu.TilingTransform((ALIGN, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH))
    narrow = (plgpu.TilingTransform((ALIGN, tile.chunk)), plgpu.SwizzleTransform(2 * tile.chunk))
    kernel = plgpu.kernel(
        functools.partial(_kernel, parts=parts, gate=GATES[gate], tile=tile, processors=processors),
        out_type=jax.ShapeDtypeStruct((rows, out_width), x.dtype),
        grid=(processors,),
        grid_names=("processor",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((tile.stages, tile.rows, DEPTH), x.dtype, transforms=transforms),
            plgpu.SMEM((tile.stages, parts, DEPTH, columns), x.dtype, transforms=transforms),
            share_memory(
                plgpu.SMEM((tile.warpgroups, 2, SHARE, tile.chunk), x.dtype, transforms=narrow),
                plgpu.SMEM((tile.warpgroups, SHARE, 2 * tile.chunk), x.dtype),
            ),
            plgpu.Barrier(num_arrivals=1 + parts, num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_grouped_matmul",
    )
    return kernel(_tiles(group_sizes, rows, tile.rows), x, weights)


def _tile(gate: str | None) -> Tile:
    return PLAIN if gate is None else GATED


def _tiles(group_sizes: jax.Array, num_rows: int, height: int) -> jax.Array:
    """int32 [tiles + 1, 4]: group (G for rows that belong to none), first row, and the first and
    the end of the rows to store; at the end how many tiles there are.
    """
    sizes = jnp.append(group_sizes, num_rows - jnp.sum(group_sizes))
    part = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    # Groups are few: a masked sum is one launch where a prefix sum is several.
    before = part[None, :] < part[:, None]
    starts = jnp.sum(jnp.where(before, sizes[None, :], 0), axis=1)
    firsts = starts // ALIGN * ALIGN
    counts = jnp.where(sizes > 0, -(-(starts + sizes - firsts) // height), 0)
    ends = jnp.sum(jnp.where(before | (part[None, :] == part[:, None]), counts[None, :], 0), axis=1)
    parts = min(num_rows, len(part))
    tile = jnp.arange(parts + (num_rows + (ALIGN - 1) * parts) // height, dtype=jnp.int32)
    of = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    of = jnp.minimum(of, len(part) - 1)
    first = firsts[of] + (tile - (ends - counts)[of]) * height
    begin, end = jnp.maximum(first, starts[of]), jnp.minimum(first + height, (starts + sizes)[of])
    table = jnp.stack([of, jnp.minimum(first, num_rows - height), begin, end], axis=1)
    return jnp.concatenate([table, jnp.broadcast_to(ends[-1], (1, 4))])


def _kernel(
    tiles_ref: Any,  # [tiles + 1, 4]
    x_ref: Any,  # [M, I]
    weights_ref: Any,  # [G, I, parts · O]
    out_ref: Any,  # [M, O]
    x_smem: Any,  # [stages, rows of a tile, DEPTH]
    weights_smem: Any,  # [stages, parts, DEPTH, columns]
    staging: Any,  # [warpgroups, 2, SHARE, chunk] and [warpgroups, SHARE, 2 · chunk]
    ready: Any,
    free: Any,
    *,
    parts: int,
    gate: Callable[..., jax.Array],
    tile: Tile,
    processors: int,
) -> None:
    stages, (block_smem, rows_smem) = tile.stages, staging
    processor, warpgroup = lax.axis_index("processor"), lax.axis_index("warpgroup")
    (groups, width, _), out_width = weights_ref.shape, out_ref.shape[1]
    columns = weights_smem.shape[3]
    across = out_width // columns
    total = tiles_ref[tiles_ref.shape[0] - 1, 0] * across
    num_own = lax.div(total - processor + (processors - 1), jnp.int32(processors))

    def extent(index: jax.Array) -> tuple[jax.Array, ...]:
        """Group, first row, rows to store, first column and steps of this processor's tile."""
        number = index * processors + processor
        row = lax.div(number, jnp.int32(across))
        group, first, begin, end = (tiles_ref[row, c] for c in range(4))
        steps = jnp.where(group < groups, width // DEPTH, 0)
        return group, first, begin, end, (number - row * across) * columns, steps

    @pl.when(warpgroup < tile.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(tile.registers[0], action="increase")

        def one_tile(index: jax.Array, step: jax.Array) -> jax.Array:
            _, first, begin, end, column, steps = extent(index)
            own = first + warpgroup * SHARE
            begin, end = jnp.maximum(begin, own), jnp.minimum(end, own + SHARE)
            live = jnp.where(begin < end, steps, 0)

            def multiply(*acc_refs: Any) -> jax.Array:
                def one_step(i: jax.Array, _: None) -> None:
                    slot = lax.rem(step + i, jnp.int32(stages))
                    plgpu.barrier_wait(ready.at[slot])
                    mine = x_smem.at[slot, pl.ds(warpgroup * SHARE, SHARE)]
                    for part, acc_ref in enumerate(acc_refs):
                        plgpu.wgmma(acc_ref, mine, weights_smem.at[slot, part])
                    plgpu.wgmma_wait(parts)

                    @pl.when(i > 0)
                    def _free() -> None:
                        plgpu.barrier_arrive(free.at[lax.rem(step + i - 1, jnp.int32(stages))])

                lax.fori_loop(0, live, one_step, None)
                return gate(*(acc_ref[...] for acc_ref in acc_refs))

            result = pl.run_scoped(multiply, *[ACC((SHARE, columns))] * parts)

            @pl.when(live > 0)
            def _free() -> None:
                plgpu.barrier_arrive(free.at[lax.rem(step + live - 1, jnp.int32(stages))])

            def pass_step(i: jax.Array, _: None) -> None:
                """Of the other warpgroups' rows."""
                slot = lax.rem(step + i, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(live, steps, pass_step, None)
            _store(
                result.astype(out_ref.dtype), out_ref, block_smem.at[warpgroup],
                rows_smem.at[warpgroup], own, begin, end, column,
            )  # fmt: skip
            return step + steps

        lax.fori_loop(0, num_own, one_tile, processor * 0)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _copy() -> None:
        plgpu.set_max_registers(tile.registers[1], action="decrease")

        def one_tile(index: jax.Array, step: jax.Array) -> jax.Array:
            group, first, _, _, column, steps = extent(index)
            rows = pl.ds(pl.multiple_of(first, ALIGN), tile.rows)

            @pl.loop(0, steps)
            def _step(i: jax.Array) -> None:
                now = step + i
                slot = lax.rem(now, jnp.int32(stages))

                @pl.when(now >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                depth = pl.ds(i * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x_ref.at[rows, depth], x_smem.at[slot], ready.at[slot])
                for part in range(parts):
                    plgpu.copy_gmem_to_smem(
                        weights_ref.at[group, depth, pl.ds(part * out_width + column, columns)],
                        weights_smem.at[slot, part],
                        ready.at[slot],
                    )

            return step + steps

        steps = lax.fori_loop(0, num_own, one_tile, processor * 0)
        for slot in range(stages):  # a barrier ends with every phase of it seen
            pl.when(slot < steps)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def _store(
    result: jax.Array,  # [SHARE, columns]
    out_ref: Any,
    blocks: Any,  # [2, SHARE, chunk], in the copy engine's blocks of ALIGN rows
    plain: Any,  # [SHARE, 2 · chunk], the same memory
    own: jax.Array,  # row that the first of `result` is
    begin: jax.Array,  # rows to store
    end: jax.Array,
    column: jax.Array,
) -> None:
    """Blocks are written in turns, and the last two may still be on their way afterwards."""
    count = end - begin

    def parts(width: int) -> list[tuple[jax.Array, Any]]:
        return [
            (result[:, at : at + width], pl.ds(column + at, width))
            for at in range(0, result.shape[1], width)
        ]

    @pl.when(count == SHARE)
    def _whole() -> None:
        rows = pl.ds(pl.multiple_of(own, ALIGN), SHARE)
        for turn, (part, columns) in enumerate(parts(blocks.shape[2])):
            block = blocks.at[turn % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            block[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(block, out_ref.at[rows, columns])

    @pl.when((count > 0) & (count < SHARE))
    def _by_rows() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part, columns in parts(plain.shape[1]):
            plain[...] = part
            plgpu.commit_smem()
            at = begin
            for size in (32, 16, 8, 4, 2, 1):

                @pl.when((count & size) > 0)
                def _rows(at: jax.Array = at, size: int = size, columns: Any = columns) -> None:
                    target = out_ref.at[pl.ds(at, size), columns]
                    plgpu.copy_smem_to_gmem(plain.at[pl.ds(at - own, size)], target)

                at = at + (count & size)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
