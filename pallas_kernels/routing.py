"""The small steps between a router and its experts: the best of each row, the order of assignments
by expert, and the tokens' rows in that order. On GPUs a step with few tokens is bound by how many
kernels it launches; XLA takes several for either of the first two, sorts among them, and one of
these does. In a step with many, XLA's copy of rows takes twice what their bytes do.

Legend: T tokens, E experts, k experts of a token, M = T · k assignments. Knows nothing of scores,
weights or devices.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import dispatch

_ORDERS = {"cpu": ("xla",), "gpu": ("pallas_triton", "xla"), "tpu": ("xla",)}
_MOST_ORDERED = 4096  # assignments that one program looks through; of more, three kernels
_MOST_COUNTED = 65536
_BLOCK, _PART = 512, 256  # assignments that one of their programs counts, and places
_PIECE = 64  # at once
# XLA: up to so many, ranks by comparing all with all are one kernel less than a scatter.
_MOST_COMPARED = 2048
_MOST_WIDE = 1024  # columns that one warp keeps in registers
_LEAST_TAKEN = 4096  # rows; fewer are as fast by XLA
_TAKEN, _LEAST_PIECE, _MOST_PIECE = 8, 256, 1024  # rows and columns of one program


class Sorted(NamedTuple):
    """Assignments in the experts' order, each expert's in the tokens'."""

    tokens: jax.Array  # int32[M] whose row comes where
    places: jax.Array  # int32[T, k] where each assignment's row is
    sizes: jax.Array  # int32[E]


def top_k(
    x: jax.Array, count: int, *, implementation: str | None = None, platform: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of float32 [T, E], the largest first, and int32 of their
    columns; of equal ones the first. Rows hold no NaN."""
    calls = {
        "xla": lambda: jax.lax.top_k(x, count),
        "pallas_triton": lambda: _top_k_triton(x, count, interpret=False),
        "pallas_triton_interpret": lambda: _top_k_triton(x, count, interpret=True),
    }
    return dispatch(calls, _ORDERS, name=implementation, platform=platform)


def sort_by_expert(
    ids: jax.Array,
    num_experts: int,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Sorted:
    """Of `ids` int32[T, k] in [0, E]; E is nobody's and comes last."""
    assert (num_experts + 1) * ids.size < 2**31, f"{num_experts=} {ids.shape=}"
    calls = {
        "xla": lambda: _sort_xla(ids, num_experts),
        "pallas_triton": lambda: _sort_triton(ids, num_experts, interpret=False),
        "pallas_triton_interpret": lambda: _sort_triton(ids, num_experts, interpret=True),
    }
    return dispatch(calls, _ORDERS, name=implementation, platform=platform)


def take_rows(
    x: jax.Array,
    rows: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """[M, C]: x[rows] of [T, C] and int32[M] in [0, T)."""
    calls = {
        "xla": lambda: x[rows],
        "pallas_triton": lambda: _take_triton(x, rows, interpret=False),
        "pallas_triton_interpret": lambda: _take_triton(x, rows, interpret=True),
    }
    return dispatch(calls, _ORDERS, name=implementation, platform=platform)


def _sort_xla(ids: jax.Array, num_experts: int) -> Sorted:
    flat, total = ids.reshape(-1), ids.size
    index = jnp.arange(total, dtype=jnp.int32)
    keys = flat * total + index
    order = jnp.sort(keys) % total
    if total <= _MOST_COMPARED:
        places = jnp.sum(keys[None, :] < keys[:, None], axis=1, dtype=jnp.int32)
    else:
        places = jnp.zeros(total, jnp.int32).at[order].set(index, unique_indices=True)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    sizes = jnp.sum(flat[:, None] == experts[None, :], axis=0, dtype=jnp.int32)
    return Sorted(order // ids.shape[1], places.reshape(ids.shape), sizes)


def _top_k_triton(x: jax.Array, count: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    rows, columns = x.shape
    if columns > _MOST_WIDE or columns & (columns - 1):
        raise NotImplementedError(f"{columns} columns: a power of two up to {_MOST_WIDE} is served")
    padded = pl.next_power_of_2(count)
    values, ids = pl.pallas_call(
        functools.partial(_top_k_kernel, count=count),
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, padded), jnp.float32),
            jax.ShapeDtypeStruct((rows, padded), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="top_k",
    )(x)
    return values[:, :count], ids[:, :count]


def _top_k_kernel(x_ref: Any, values_ref: Any, ids_ref: Any, *, count: int) -> None:
    """One row: `count` times the largest that is left."""
    row, columns, padded = pl.program_id(0), x_ref.shape[1], values_ref.shape[1]
    index, column = jnp.arange(padded), jnp.arange(columns)
    left = x_ref[row, :]
    values, ids = jnp.zeros(padded, jnp.float32), jnp.zeros(padded, jnp.int32)
    taken = jnp.zeros(columns, jnp.bool_)
    for i in range(count):
        best = jnp.max(jnp.where(taken, -jnp.inf, left))
        # A row of −inf has its columns taken in order.
        first = jnp.min(jnp.where(~taken & (left == best), column, columns - 1))
        values = jnp.where(index == i, best, values)
        ids = jnp.where(index == i, first, ids)
        taken |= column == first
    values_ref[row, :] = values
    ids_ref[row, :] = ids


def _sort_triton(ids: jax.Array, num_experts: int, *, interpret: bool) -> Sorted:
    total = ids.size
    if total > _MOST_COUNTED:
        raise NotImplementedError(f"{total} assignments: up to {_MOST_COUNTED} are served")
    if total > _MOST_ORDERED:
        return _count_triton(ids, num_experts, interpret=interpret)
    tokens, places, sizes = pl.pallas_call(
        functools.partial(_sort_kernel, top_k=ids.shape[1]),
        grid=(num_experts + 1,),
        # Of just these sizes: to cut a result off, or to lengthen the argument, is another launch.
        out_shape=(
            jax.ShapeDtypeStruct((total,), jnp.int32),
            jax.ShapeDtypeStruct((total,), jnp.int32),
            jax.ShapeDtypeStruct((num_experts,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sort_by_expert",
    )(ids.reshape(-1))
    return Sorted(tokens, places.reshape(ids.shape), sizes)


def _sort_kernel(
    ids_ref: Any, tokens_ref: Any, places_ref: Any, sizes_ref: Any, *, top_k: int
) -> None:
    """One expert, the last one nobody: where its rows begin, and in which order they come."""
    expert, total = pl.program_id(0), ids_ref.shape[0]
    index = jnp.arange(max(16, pl.next_power_of_2(total)))
    there = index < total
    ids = ids_ref[jnp.minimum(index, total - 1)]
    mine = there & (ids == expert)
    before = jnp.sum((there & (ids < expert)).astype(jnp.int32))
    place = before + jnp.cumsum(mine.astype(jnp.int32)) - 1
    plgpu.store(tokens_ref.at[jnp.where(mine, place, total)], index // top_k, mask=mine)
    plgpu.store(places_ref.at[jnp.where(mine, index, total)], place, mask=mine)

    @pl.when(expert < sizes_ref.shape[0])
    def _count() -> None:
        sizes_ref[expert] = jnp.sum(mine.astype(jnp.int32))


def _count_triton(ids: jax.Array, num_experts: int, *, interpret: bool) -> Sorted:
    """As _sort_triton: each block counts its experts' assignments, each expert finds where its rows
    of each block begin, and each part of a block places its own."""
    total = ids.size
    blocks = pl.next_power_of_2(pl.cdiv(total, _BLOCK))
    # Behind the assignments, those of no program at all.
    padding = (0, blocks * _BLOCK - total)
    flat = jnp.pad(ids.reshape(-1), padding, constant_values=num_experts + 1)
    width = pl.next_power_of_2(num_experts + 2)
    counts = pl.pallas_call(
        _count_kernel,
        grid=(blocks,),
        out_shape=jax.ShapeDtypeStruct((blocks, width), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="count_by_expert",
    )(flat)
    starts, sizes = pl.pallas_call(
        _starts_kernel,
        grid=(num_experts + 1,),
        out_shape=(
            jax.ShapeDtypeStruct((blocks, num_experts + 1), jnp.int32),
            jax.ShapeDtypeStruct((num_experts,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="starts_of_experts",
    )(counts)
    tokens, places = pl.pallas_call(
        functools.partial(_place_kernel, top_k=ids.shape[1]),
        grid=(pl.cdiv(total, _PART),),
        out_shape=(
            jax.ShapeDtypeStruct((total,), jnp.int32),
            jax.ShapeDtypeStruct((total,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="place_by_expert",
    )(flat, starts)
    return Sorted(tokens, places.reshape(ids.shape), sizes)


def _count_kernel(ids_ref: Any, counts_ref: Any) -> None:
    """One block: how many assignments each expert has there."""
    block, width = pl.program_id(0), counts_ref.shape[1]
    experts = jnp.arange(width)

    def one_piece(i: jax.Array, counts: jax.Array) -> jax.Array:
        ids = ids_ref[pl.ds(block * _BLOCK + i * _PIECE, _PIECE)]
        return counts + jnp.sum((ids[:, None] == experts[None, :]).astype(jnp.int32), axis=0)

    none = jnp.zeros(width, jnp.int32)
    counts_ref[block, :] = jax.lax.fori_loop(0, _BLOCK // _PIECE, one_piece, none)


def _starts_kernel(counts_ref: Any, starts_ref: Any, sizes_ref: Any) -> None:
    """One expert: where its rows of each block begin, and how many it has."""
    expert, (blocks, width) = pl.program_id(0), counts_ref.shape
    at_once = min(blocks, 16)

    def some_blocks(i: jax.Array, before: jax.Array) -> jax.Array:
        return before + jnp.sum(counts_ref[pl.ds(i * at_once, at_once), :], axis=0)

    sums = jax.lax.fori_loop(0, blocks // at_once, some_blocks, jnp.zeros(width, jnp.int32))
    before = jnp.sum(jnp.where(jnp.arange(width) < expert, sums, 0))
    own = counts_ref[:, expert]
    starts_ref[:, expert] = before + jnp.cumsum(own) - own

    @pl.when(expert < sizes_ref.shape[0])
    def _count() -> None:
        sizes_ref[expert] = jnp.sum(own)


def _place_kernel(
    ids_ref: Any, starts_ref: Any, tokens_ref: Any, places_ref: Any, *, top_k: int
) -> None:
    """A part of a block: an assignment comes behind those of its expert that the block has before
    it."""
    first, total = pl.program_id(0) * _PART, tokens_ref.shape[0]
    block = first // _BLOCK
    index, ids = first + jnp.arange(_PART), ids_ref[pl.ds(first, _PART)]

    def one_piece(i: jax.Array, rank: jax.Array) -> jax.Array:
        at = block * _BLOCK + i * _PIECE
        before = (at + jnp.arange(_PIECE))[None, :] < index[:, None]
        same = ids[:, None] == ids_ref[pl.ds(at, _PIECE)][None, :]
        return rank + jnp.sum((same & before).astype(jnp.int32), axis=1)

    pieces = (first - block * _BLOCK + _PART) // _PIECE
    rank = jax.lax.fori_loop(0, pieces, one_piece, jnp.zeros(_PART, jnp.int32))
    real = index < total
    place = starts_ref[block, jnp.where(real, ids, 0)] + rank
    plgpu.store(tokens_ref.at[jnp.where(real, place, total)], index // top_k, mask=real)
    plgpu.store(places_ref.at[jnp.where(real, index, total)], place, mask=real)


def _take_triton(x: jax.Array, rows: jax.Array, *, interpret: bool) -> jax.Array:
    count, width = len(rows), x.shape[1]
    piece = min(width & -width, _MOST_PIECE)
    if piece < _LEAST_PIECE or count < _LEAST_TAKEN or count % _TAKEN:
        raise NotImplementedError(
            f"{count} rows of {width}: from {_LEAST_TAKEN} on by {_TAKEN} of whole "
            f"{_LEAST_PIECE} are served"
        )
    return pl.pallas_call(
        functools.partial(_take_kernel, piece=piece),
        grid=(width // piece, count // _TAKEN),
        out_shape=jax.ShapeDtypeStruct((count, width), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="take_rows",
    )(x, rows)


def _take_kernel(x_ref: Any, rows_ref: Any, out_ref: Any, *, piece: int) -> None:
    columns = pl.ds(pl.program_id(0) * piece, piece)
    to = pl.ds(pl.program_id(1) * _TAKEN, _TAKEN)
    out_ref[to, columns] = x_ref[rows_ref[to], columns]
