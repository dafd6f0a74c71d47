"""The grouped matmul on GPUs: one Pallas kernel for the Triton backend.

A program computes a tile: up to `rows` consecutive rows of one group, times `columns` columns of
the group's matrix, summed over I in steps of `depth`. Tiles are counted group by group, so a group
without rows has none, and a program finds its tile from the group sizes alone: nothing is planned
in other launches. There are as many programs as the worst distribution of M rows over G groups
needs; the others leave at once. Tiles of one group follow each other, columns first, so that a
matrix which several tiles read comes from memory once.

    few rows a group    the matrices' bytes are the time; 16 rows, many small loads in flight
    many rows           arithmetic is the time; a group's last tile takes the smallest height that
                        holds it

No load or store is masked but where no step divides I: a row past the tile's end is a copy of its
last one, computes the same values and stores them to the same place. Runs in interpret mode on CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_LEAST = 16  # of rows, columns and depth: what a matrix instruction takes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes, and with what: powers of two, sizes at least 16."""

    heights: tuple[int, ...]  # rows that a tile can have, ascending; the last is what a tile holds
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def rows(self) -> int:
        return self.heights[-1]


#: By the mean number of rows a group, up to which an entry serves.
_TILES: tuple[tuple[float, Tile], ...] = (
    (6, Tile(heights=(16,), columns=64, depth=64, warps=4, stages=4)),
    (20, Tile(heights=(16, 32), columns=64, depth=64, warps=4, stages=4)),
    (48, Tile(heights=(16, 64), columns=128, depth=64, warps=4, stages=4)),
    (256, Tile(heights=(64, 128), columns=128, depth=64, warps=8, stages=3)),
    (float("inf"), Tile(heights=(64, 128), columns=256, depth=64, warps=8, stages=4)),
)


def tile_for(rows: int, groups: int) -> Tile:
    """The tile for a call of these sizes, which are all that is known when it is compiled."""
    mean = rows / groups
    return next(tile for most, tile in _TILES if mean <= most)


def matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # [G]
    *,
    out_dtype: jnp.dtype,
    interpret: bool = False,
    tile: Tile | None = None,
) -> jax.Array:
    """[M, O]. `tile` None: `tile_for` says."""
    rows, width = x.shape
    groups, _, out_width = weights.shape
    tile = _fitted(tile or tile_for(rows, groups), width, out_width, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(pl.cdiv(out_width, tile.columns), num_tiles(rows, groups, tile.rows)),
        out_shape=jax.ShapeDtypeStruct((rows, out_width), out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(group_sizes, x, weights)


def num_tiles(rows: int, groups: int, height: int) -> int:
    """The most tiles that `rows` rows need, however they fall into `groups` groups and the rows
    that belong to none: every part that has rows begins one.
    """
    parts = min(rows, groups + 1)
    return parts + (rows - parts) // height


def _fitted(tile: Tile, width: int, out_width: int, dtype: jnp.dtype) -> Tile:
    """The tile with steps that divide the widths where a power of two can; smaller for float32, to
    fit shared memory and registers.
    """
    heights, columns, depth = tile.heights, tile.columns, tile.depth
    if dtype == jnp.float32:
        heights = tuple(sorted({min(height, 64) for height in heights}))
        columns, depth = min(columns, 128), max(_LEAST, depth // 4)
    return dataclasses.replace(
        tile, heights=heights, columns=_step(columns, out_width), depth=_step(depth, width)
    )


def _step(step: int, width: int) -> int:
    """The largest power of two that is at most `step` and divides `width`; if that is less than 16,
    one that does not divide it.
    """
    divides = min(step, width & -width)
    if divides >= _LEAST:
        return divides
    return max(_LEAST, min(step, 64, pl.next_power_of_2(width)))


def _kernel(
    sizes_ref: Any,  # [G]
    x_ref: Any,  # [M, I]
    weights_ref: Any,  # [G, I, O]
    out_ref: Any,  # [M, O]
    *,
    tile: Tile,
) -> None:
    column, groups = pl.program_id(0), sizes_ref.shape[0]
    group, first, count = _locate(sizes_ref, pl.program_id(1), tile.rows, out_ref.shape[0])
    real = group < groups
    shorter = 0
    for height in tile.heights:
        fits = real & (count > shorter)
        if height != tile.rows:
            fits &= count <= height

        @pl.when(fits)
        def _tile(height: int = height) -> None:
            rows = first + jnp.minimum(jnp.arange(height), count - 1)
            total = _product(x_ref, weights_ref, rows, group, column, tile)
            _store(out_ref, rows, column, total, tile)

        shorter = height

    @pl.when(jnp.logical_not(real) & (count > 0))
    def _nobodys_rows() -> None:
        rows = first + jnp.minimum(jnp.arange(tile.rows), count - 1)
        _store(out_ref, rows, column, jnp.zeros((tile.rows, tile.columns), jnp.float32), tile)


def _locate(
    sizes_ref: Any, tile: jax.Array, height: int, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group of a tile (at least G: the rows that belong to none), its first row, and how many it
    has: none or fewer for a spare tile.
    """
    groups = sizes_ref.shape[0]
    lane = jnp.arange(pl.next_power_of_2(max(groups, 2)))
    sizes = jnp.where(lane < groups, sizes_ref[jnp.minimum(lane, groups - 1)], 0)
    tiles = lax.div(sizes + (height - 1), jnp.int32(height))
    over = jnp.cumsum(tiles) <= tile  # groups whose tiles all come before this one
    group = jnp.sum(over.astype(jnp.int32))
    start = jnp.sum(jnp.where(over, sizes, 0))
    offset = (tile - jnp.sum(jnp.where(over, tiles, 0))) * height
    size = jnp.where(group < groups, sizes_ref[jnp.minimum(group, groups - 1)], num_rows - start)
    return group, start + offset, jnp.minimum(size - offset, height)


def _product(
    x_ref: Any, weights_ref: Any, rows: jax.Array, group: jax.Array, column: jax.Array, tile: Tile
) -> jax.Array:
    """x[rows] · weights[group] of one block of columns: float32 [R, columns]."""
    width = x_ref.shape[1]
    whole, rest = divmod(width, tile.depth)
    even = weights_ref.shape[2] % tile.columns == 0
    columns = pl.ds(column * tile.columns, tile.columns)

    def one_step(i: jax.Array, total: jax.Array) -> jax.Array:
        depth = pl.ds(i * tile.depth, tile.depth)
        if even:
            matrix = weights_ref[group, depth, columns]
        else:
            matrix = uneven(i * tile.depth + jnp.arange(tile.depth))
        return total + _dot(x_ref[rows, depth], matrix)

    def uneven(index: jax.Array) -> jax.Array:
        """Rows `index` of the matrix; columns past its edge are copies of the last one."""
        shape = (tile.depth, tile.columns)
        edge = jnp.minimum(
            column * tile.columns + jnp.arange(tile.columns), weights_ref.shape[2] - 1
        )
        spread = (jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(edge[None, :], shape))
        return weights_ref[(jnp.broadcast_to(group, shape), *spread)]

    total = jnp.zeros((rows.shape[0], tile.columns), jnp.float32)
    total = lax.fori_loop(0, whole, one_step, total)
    if rest:  # steps past I repeat its last one, times 0
        step = jnp.arange(tile.depth)
        index = jnp.minimum(whole * tile.depth + step, width - 1)
        shape = (rows.shape[0], tile.depth)
        at = (jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(index[None, :], shape))
        part = jnp.where((step < rest)[None, :], x_ref[at], jnp.zeros((), x_ref.dtype))
        total += _dot(part, uneven(index))
    return total


def _store(out_ref: Any, rows: jax.Array, column: jax.Array, total: jax.Array, tile: Tile) -> None:
    out_width = out_ref.shape[1]
    if out_width % tile.columns == 0:
        out_ref[rows, pl.ds(column * tile.columns, tile.columns)] = total.astype(out_ref.dtype)
        return
    index = jnp.minimum(column * tile.columns + jnp.arange(tile.columns), out_width - 1)
    at = (jnp.broadcast_to(rows[:, None], total.shape), jnp.broadcast_to(index, total.shape))
    out_ref[at] = total.astype(out_ref.dtype)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)
