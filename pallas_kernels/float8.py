"""float8 for stored keys and values: what a pool of them is made of, and how numbers go in and out.
Knows no slots and no rows.

float8_e4m3fn has no infinity, and one of float8_e5m2 would poison a softmax: so what is too large
is stored as the largest finite number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: XLA for CPUs computes nothing in float8, not even a write in place: it converts all of a pool to
#: float16 and back. There a pool is of integers, whose bits are the numbers and whose type tells
#: the format.
BITS = {
    jnp.dtype("float8_e4m3fn"): jnp.dtype("int8"),
    jnp.dtype("float8_e5m2"): jnp.dtype("uint8"),
}
_FORMATS = {bits: dtype for dtype, bits in BITS.items()}


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as a pool of `dtype` holds it: rounded, and limited if float8. NaN stays NaN."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    number = _FORMATS.get(dtype, dtype)
    most = float(jnp.finfo(number).max)
    # NOTE: comparisons, because Triton's minimum and maximum of NaN and a number are the number.
    x = jnp.where(x > most, most, jnp.where(x < -most, -most, x)).astype(number)
    return x if number == dtype else lax.bitcast_convert_type(x, dtype)


def loaded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What a pool holds as numbers of a wider dtype. bfloat16 holds every float8 as it is."""
    number = _FORMATS.get(x.dtype, x.dtype)
    return (x if number == x.dtype else lax.bitcast_convert_type(x, number)).astype(dtype)
