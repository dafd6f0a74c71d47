"""The description of one parameter: shape, dtype, logical axes, and which checkpoint tensors it is
made of.

Models list their parameters once as WeightSpecs; initialisation, sharding, loading and saving all
derive from the list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor and where it goes in the (fused) parameter.

    `name` is the Hugging Face tensor name, `shape` what the file must hold; `place(target, tensor)`
    writes the tensor into the host array of the whole parameter (fusing, transposing, replicating
    or padding as the layout needs); with `entry`, into that entry of its first axis, an expert's.
    """

    name: str
    shape: tuple[int, ...]
    place: Callable[[np.ndarray, np.ndarray], None]
    entry: int | None = None

    def part(self, param: np.ndarray) -> np.ndarray:
        """What `place` writes into: a view of the parameter."""
        return param if self.entry is None else param[self.entry]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter of the model: `path` is its key in the flat params dict, e.g.
    `layers.3.attention.qkv`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    pieces: tuple[Piece, ...]
    init_scale: float = (
        0.02  # standard deviation for --load-format dummy; a norm weight uses init_value
    )
    init_value: float | None = None
