"""A step in the making: what admission grants of a prompt, the prompt row that the roster makes of
it, and the rows that decode. Records only; assembly.py turns them into arrays.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jserve.cache.manager import Lease
from jserve.plan import SlotEdit
from jserve.scheduler.request import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """A request's tokens [begin, end) may be computed in this step."""

    lease: Lease
    begin: int
    end: int
    pages: np.ndarray  # int32[·] new ones, in the lease already
    final: bool  # the prompt ends with this chunk


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A prompt row of the step."""

    row: Row
    grant: Grant
    output_index: int
    samples: bool
    edit: SlotEdit | None  # with the first chunk of a stay


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decode rows of the step. `pressed`: pages ran short, so no prompt may come in now."""

    rows: tuple[Row, ...]
    slots: np.ndarray  # int32[R]
    new_pages: np.ndarray  # int32[R]
    output_index: np.ndarray  # int32[R]
    pressed: bool


NO_DECODE = DecodeRows((), *(np.empty(0, np.int32),) * 3, pressed=False)
