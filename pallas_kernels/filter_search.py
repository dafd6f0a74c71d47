"""Where top-k and top-p cut a row of the vocabulary, found without a sort: one kernel on GPUs, a
program a row, which reads the row again for every DIGIT bits of the answer. Written for Pallas's
Triton backend; interpretable on CPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

NO_LIMIT = 0x7F7FFFFF  # bits of the largest finite float32
DIGIT = 2
_BITS = 31  # of a float32 without its sign
_CHUNK = 8192  # tokens that a program reads at once
_VECTOR = 4  # of them that one thread holds side by side
_WARPS = 16


def limits(
    distance: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    interpret: bool = False,
    digit: int = DIGIT,
    chunk: int = _CHUNK,
    warps: int = _WARPS,
) -> jax.Array:
    """int32[N]: bits of the largest t with count(distance < t) < top_k and sum(p[distance < t]) ≤
    top_p · sum(p), where p = exp(−distance); NO_LIMIT where neither cuts.

    Both sides grow with t, and the bits of distances, which are ≥ 0, order like integers: so t is
    built from the top, DIGIT bits at a time. A subset is summed in the order of the whole, so that
    it never exceeds it.

    Args:
        distance: float32 [N, V], ≥ 0, +inf where a token is forbidden.
        top_k, top_p: int32[N], float32[N].
    """
    rows, vocab = distance.shape
    idle = (top_k >= vocab) & (top_p >= 1.0)
    return pl.pallas_call(
        functools.partial(_kernel, digit=digit, chunk=chunk),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="filter_search",
    )(distance, top_k, top_p, idle.astype(jnp.int32))


def _kernel(
    distance_ref: Any,  # [N, V]
    top_k_ref: Any,  # [N]
    top_p_ref: Any,
    idle_ref: Any,
    limit_ref: Any,
    *,
    digit: int,
    chunk: int,
) -> None:
    row = pl.program_id(0)
    vocab = distance_ref.shape[1]
    whole_chunks, rest = divmod(vocab, chunk)
    shape = (chunk // _VECTOR, _VECTOR)

    def below(bounds: list[jax.Array]) -> list[jax.Array]:
        """For each bound, sum(p) and the number of tokens whose distance has bits under it."""

        def add(sums: tuple[jax.Array, ...], distance: jax.Array) -> tuple[jax.Array, ...]:
            bits = lax.bitcast_convert_type(distance, jnp.int32)
            p = jnp.exp2(distance * -math.log2(math.e))
            added = []
            for bound in bounds:
                under = bits < bound
                added += [
                    jnp.sum(jnp.where(under, p, 0.0), axis=1),
                    jnp.sum(jnp.where(under, 1.0, 0.0), axis=1),
                ]
            return tuple(a + b for a, b in zip(sums, added, strict=True))

        def one_chunk(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return add(sums, distance_ref[row, pl.ds(i * chunk, chunk)].reshape(shape))

        sums = (jnp.zeros(shape[:1], jnp.float32),) * (2 * len(bounds))
        sums = lax.fori_loop(0, whole_chunks, one_chunk, sums)
        if rest:
            index = whole_chunks * chunk + jnp.arange(chunk)
            last = distance_ref[jnp.broadcast_to(row, index.shape), jnp.minimum(index, vocab - 1)]
            sums = add(sums, jnp.where(index < vocab, last, jnp.inf).reshape(shape))
        return [jnp.sum(x, axis=0) for x in sums]

    infinity = jnp.int32(0x7F800000)
    idle, top_k = idle_ref[row], top_k_ref[row].astype(jnp.float32)
    budget = top_p_ref[row] * below([infinity])[0]
    rounds = -(-_BITS // digit)

    def one_round(i: jax.Array, limit: jax.Array) -> jax.Array:
        shift = jnp.int32(digit) * (rounds - 1 - i)
        bounds = [limit | lax.shift_left(jnp.int32(j), shift) for j in range(1, 1 << digit)]
        found = below(bounds)
        most = lax.shift_right_logical(jnp.int32(0x7FFFFFFF), shift)  # the top digit's last value
        fits = jnp.int32(0)
        for j, (mass, count) in enumerate(zip(found[::2], found[1::2], strict=True), start=1):
            fits += ((j <= most) & (count < top_k) & (mass <= budget)).astype(jnp.int32)
        return limit | lax.shift_left(fits, shift)

    first = idle * rounds  # NOTE: Triton wants both bounds of one type, so neither is a literal
    limit = lax.fori_loop(first, jnp.maximum(first, rounds), one_round, jnp.int32(0))
    limit_ref[row] = jnp.where(idle > 0, jnp.int32(NO_LIMIT), limit)
