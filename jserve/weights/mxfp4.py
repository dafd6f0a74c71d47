"""Tensors that a checkpoint holds in MXFP4, as the whole tensors they stand for.

`x_blocks` uint8 [E, O, G, 16] holds G blocks of 32 numbers of 4 bits for each of E · O outputs, the
first of a pair in the low half of its byte; `x_scales` uint8 [E, O, G] the power of two (127 is 1)
that a block's numbers share. They become `x` bfloat16 [E, 32 · G, O], inputs first as an unpacked
checkpoint has it; bfloat16 holds every such number. Source: OCP Microscaling Formats (MX) v1.0,
§5.3.3 (FP4, E2M1) and §5.4.1 (E8M0).
"""

from __future__ import annotations

import itertools
from collections.abc import KeysView
from pathlib import Path

import ml_dtypes
import numpy as np

from jserve.errors import WeightError
from jserve.weights.hf import SafetensorsSource

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NO_NUMBER = 255  # the scale that makes its whole block NaN
_OUTPUTS = 128  # unpacked at a time


class MXFP4Source:
    """TensorSource over another one; tensors that are not packed pass through."""

    def __init__(self, source: SafetensorsSource) -> None:
        """Raises WeightError for blocks without their scales, or of another form."""
        self.files, self._source = source.files, source
        packed = {name for name in source.names() if _packed(source, name)}
        scales = {_whole(name) + _SCALES for name in packed}
        self._names = {
            _whole(name) if name in packed else name: name
            for name in source.names()
            if name not in scales
        }
        self._packed = {_whole(name) for name in packed}
        self._pairs = _pairs()

    def names(self) -> KeysView[str]:
        """In the order of the files, a packed tensor where its blocks are."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(self._names[name])
        if name not in self._packed:
            return shape
        experts, outputs, groups, _ = shape
        return experts, groups * 2 * _BLOCK_BYTES, outputs

    def file(self, name: str) -> Path:
        return self._source.file(self._names[name])

    def read(self, name: str) -> np.ndarray:
        """A packed tensor is unpacked as it is read, few outputs at a time: a cache holds those."""
        if name not in self._packed:
            return self._source.read(name)
        found, scales = (self._source.raw(name + part) for part in (_BLOCKS, _SCALES))
        experts, inputs, outputs = self.shape(name)
        whole = np.empty((experts, inputs, outputs), ml_dtypes.bfloat16)
        for expert, start in itertools.product(range(experts), range(0, outputs, _OUTPUTS)):
            some = slice(start, start + _OUTPUTS)
            index = (scales[expert, some].astype(np.uint16) << 8)[..., None] | found[expert, some]
            numbers = np.take(self._pairs, index).view(ml_dtypes.bfloat16)
            whole[expert, :, some] = numbers.reshape(-1, inputs).T
        return whole


def _packed(source: SafetensorsSource, name: str) -> bool:
    """Whether it is a tensor's blocks; raises WeightError when they cannot be unpacked."""
    if not name.endswith(_BLOCKS):
        return False
    blocks, scales = source.shape(name), _whole(name) + _SCALES
    if scales not in source.names():
        raise WeightError(f"{source.file(name)}: tensor {scales} is missing, {name} needs it")
    for part, dimensions in ((name, 4), (scales, 3)):
        shape, dtype = source.shape(part), source.dtype(part)
        if dtype != np.uint8 or len(shape) != dimensions or shape[:3] != blocks[:3]:
            raise WeightError(
                f"{source.file(part)}: tensor {part} is {dtype} {shape}, MXFP4 is uint8 "
                f"[E, O, G, {_BLOCK_BYTES}] with scales [E, O, G]"
            )
    if blocks[3] != _BLOCK_BYTES:
        raise WeightError(
            f"{source.file(name)}: tensor {name} has blocks of {blocks[3]} bytes, MXFP4 has "
            f"{_BLOCK_BYTES}"
        )
    return True


def _whole(name: str) -> str:
    return name.removesuffix(_BLOCKS)


def _pairs() -> np.ndarray:
    """uint32 [scale · 256 + byte]: the byte's two numbers times the scale, as bfloat16."""
    scales = np.ldexp(1.0, np.arange(256) - 127)
    scales[_NO_NUMBER] = np.nan
    codes = np.array((*_NUMBERS, *(-x for x in _NUMBERS)))
    byte = np.arange(256)
    pair = np.stack([codes[byte & 15], codes[byte >> 4]], axis=-1)  # [256, 2]
    with np.errstate(over="ignore"):  # 6 · 2 ** 127 and its like are infinite in bfloat16
        numbers = (scales[:, None, None] * pair).astype(ml_dtypes.bfloat16)
    return numbers.view(np.uint32).reshape(-1)
