"""What a prefix cache without limits would hold: how much of a text was seen before.

A text that another one goes on is kept as a part of that, so that a conversation costs its length
and not the sum of its beginnings.
"""

from __future__ import annotations

import bisect

from jserve.lang.roles import shared_length


class Prefixes:
    """Texts in order, none the beginning of another: of all, those beside a text have the longest
    beginning in common with it."""

    def __init__(self) -> None:
        self._texts: list[_Longest] = []

    def longest(self, text: str) -> int:
        """Characters at the beginning of `text` that a text added before begins with, too."""
        at = bisect.bisect(self._texts, text, key=_text)
        beside = self._texts[max(at - 1, 0) : at + 1]
        return max((shared_length(text, one.text) for one in beside), default=0)

    def add(self, text: str) -> Kept:
        at = bisect.bisect(self._texts, text, key=_text)
        if at < len(self._texts) and self._texts[at].text.startswith(text):
            return Kept(self._texts[at], len(text))
        if at and text.startswith(self._texts[at - 1].text):
            self._texts[at - 1].text = text
            return Kept(self._texts[at - 1], len(text))
        self._texts.insert(at, _Longest(text))
        return Kept(self._texts[at], len(text))

    def clear(self) -> None:
        self._texts.clear()


class _Longest:
    """The longest one of texts that go on each other, so far."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Kept:
    """A text that was added, which others may go on."""

    __slots__ = ("_length", "_longest")

    def __init__(self, longest: _Longest, length: int) -> None:
        self._longest, self._length = longest, length

    @property
    def text(self) -> str:
        return self._longest.text[: self._length]


def _text(longest: _Longest) -> str:
    return longest.text
