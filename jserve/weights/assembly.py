"""A parameter on the host, from its first checkpoint tensor to its last.

Owns what of it exists there meanwhile, and how a device's shard is cut from that. A parameter that
whole tensors make up is whole; of one with tensors for each expert there are only the shards of
this host's devices, and the expert at hand. Knows no files and no devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jserve.weights.spec import Piece, WeightSpec

Index = tuple[slice, ...]  # of a device's shard, as jax.sharding has it
_Box = tuple[tuple[int, int], ...]  # the same, from where to where


class Assembly(Protocol):
    def wants(self, piece: Piece) -> bool:
        """Whether this host needs it; the others are not to be read."""
        ...

    def add(self, piece: Piece, tensor: np.ndarray) -> None: ...

    def shard(self, index: Index) -> np.ndarray:
        """Once all wanted pieces are in. Not to be written: a device may share its memory."""
        ...


def assembly_of(spec: WeightSpec, dtype: np.dtype, indices: Iterable[Index]) -> Assembly:
    """`indices` are those of this host's devices; nothing is allocated yet."""
    of_experts = all(piece.entry is not None for piece in spec.pieces)
    return _ExpertShards(spec, dtype, indices) if of_experts else _Whole(spec, dtype)


class _Whole:
    def __init__(self, spec: WeightSpec, dtype: np.dtype) -> None:
        self._shape, self._dtype = spec.shape, dtype
        self._host: np.ndarray | None = None

    def wants(self, piece: Piece) -> bool:
        return True

    def add(self, piece: Piece, tensor: np.ndarray) -> None:
        if self._host is None:
            self._host = np.zeros(self._shape, self._dtype)
        piece.place(piece.part(self._host), tensor)

    def shard(self, index: Index) -> np.ndarray:
        assert self._host is not None, "no piece was added"
        return self._host[index]


class _ExpertShards:
    """Axis 0 is that of experts. Where others are split too, an expert is put together aside."""

    def __init__(self, spec: WeightSpec, dtype: np.dtype, indices: Iterable[Index]) -> None:
        self._shape, self._dtype = spec.shape, dtype
        self._boxes = list(dict.fromkeys(_box(index, spec.shape) for index in indices))
        self._is_split = any(_size(box)[1:] != spec.shape[1:] for box in self._boxes)
        self._shards: dict[_Box, np.ndarray] = {}
        self._aside: dict[int, np.ndarray] = {}
        self._missing = Counter(piece.entry for piece in spec.pieces)

    def wants(self, piece: Piece) -> bool:
        return any(True for _ in self._holding(piece.entry))

    def add(self, piece: Piece, tensor: np.ndarray) -> None:
        entry = piece.entry
        assert entry is not None, f"{piece.name} is of no expert"
        if not self._is_split:
            for box in self._holding(entry):
                piece.place(self._shard(box)[entry - box[0][0]], tensor)
            return
        if entry not in self._aside:
            self._aside[entry] = np.zeros(self._shape[1:], self._dtype)
        piece.place(self._aside[entry], tensor)
        self._missing[entry] -= 1
        if not self._missing[entry]:
            whole = self._aside.pop(entry)
            for box in self._holding(entry):
                part = tuple(slice(*bounds) for bounds in box[1:])
                self._shard(box)[entry - box[0][0]] = whole[part]

    def shard(self, index: Index) -> np.ndarray:
        assert not self._aside, f"experts without all their tensors: {sorted(self._aside)}"
        return self._shards[_box(index, self._shape)]

    def _holding(self, entry: int | None) -> Iterable[_Box]:
        return (box for box in self._boxes if entry is not None and box[0][0] <= entry < box[0][1])

    def _shard(self, box: _Box) -> np.ndarray:
        if box not in self._shards:
            self._shards[box] = np.zeros(_size(box), self._dtype)
        return self._shards[box]


def _box(index: Index, shape: tuple[int, ...]) -> _Box:
    bounds = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return tuple(bounds)


def _size(box: _Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
