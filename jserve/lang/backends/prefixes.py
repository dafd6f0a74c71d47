"""What a prefix cache without limits would hold: how much of a text was seen before."""

from __future__ import annotations

import bisect

from jserve.lang.roles import shared_length


class Prefixes:
    """Texts in order: of all, those beside a text have the longest beginning in common with it."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def longest(self, text: str) -> int:
        """Characters at the beginning of `text` that a text added before begins with, too."""
        at = bisect.bisect(self._texts, text)
        beside = self._texts[max(at - 1, 0) : at + 1]
        return max((shared_length(text, one) for one in beside), default=0)

    def add(self, text: str) -> None:
        bisect.insort(self._texts, text)

    def clear(self) -> None:
        self._texts.clear()
