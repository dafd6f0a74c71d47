"""Histograms as plain integers: what the tick can afford (0.3 µs an observation), and what crosses
from the engine to the API process. Knows no names but those it is given.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence


class Histogram:
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last counts
    those above all. One thread observes at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # the sum of what was observed

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


def numbers(histograms: Mapping[str, Histogram]) -> dict[str, list[float]]:
    """Each as its counts and, last, its total."""
    return {name: [*one.counts, one.total] for name, one in histograms.items()}
