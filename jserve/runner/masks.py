"""Grammar bitmasks as a head takes them: int32 [rows, ceil(V / 32)], a set bit allows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import numpy as np


def allow_everything(
    sizes: Iterable[int],
    vocab: int,
    sharding: jax.sharding.Sharding,
    ranks: tuple[int, ...] = (),
) -> dict[int, jax.Array]:
    """For each number of rows a mask on device, for steps without a grammar; `ranks` as a leading
    axis."""
    shapes = {rows: (*ranks, rows, math.ceil(vocab / 32)) for rows in sizes}
    return {
        rows: jax.device_put(np.full(shape, -1, np.int32), sharding)
        for rows, shape in shapes.items()
    }


def pad_mask(mask: np.ndarray, rows: int) -> np.ndarray:
    """A mask [n, …] as [rows, …]; padding allows everything."""
    assert mask.dtype == np.int32 and len(mask) <= rows, f"{mask.dtype=} {mask.shape=} {rows=}"
    if len(mask) == rows:
        return mask
    packed = np.full((rows, mask.shape[1]), -1, np.int32)
    packed[: len(mask)] = mask
    return packed
