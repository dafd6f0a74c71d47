"""The seam between what is done and how long it takes: two functions, which do nothing unless
metrics are on. Who composes the parts of a process chooses which; the parts do not ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """`series` are those of families.py. One thread calls the functions of one Timing at a time."""

    observe: Callable[[str, float], None] = lambda series, value: None
    #: (series, function) → the function, timed.
    watch: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda series, call: call
    #: All histograms since the start, as histogram.numbers has them.
    numbers: Callable[[], dict[str, list[float]]] = dict


UNTIMED = Timing()
