"""How large arrays of one-byte numbers GPU kernels reach.

Pallas' Triton backend counts offsets into an array of up to 4 GiB in 32 bits, of which one is the
sign: nothing behind 2**31 elements is reached. In a larger one it counts in 64. So numbers of two
bytes are always reached, and float8 in arrays of up to 2 GiB, or of more than 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

_REACHED, _COUNTED_SHORT = 2**31 - 1, 2**32


def reached_pages(num_pages: int, arrays: Callable[[int], Iterable[Any]]) -> int:
    """`num_pages`, or the most below that whose arrays are all reached. `arrays`: what a pool of so
    many pages is made of, as ShapeDtypeStructs with shardings.
    """
    while unreached := max(filter(_is_unreached, map(_elements, arrays(num_pages))), default=0):
        num_pages = num_pages * _REACHED // unreached
    return num_pages


def _is_unreached(elements: int) -> bool:
    return _REACHED < elements <= _COUNTED_SHORT


def _elements(array: Any) -> int:
    """Of one byte, on each device."""
    return math.prod(array.sharding.shard_shape(array.shape)) if array.dtype.itemsize == 1 else 0
