"""Finds stop strings in text that arrives piece by piece, and holds back what may begin one. It
knows no tokens. Requests without stop strings never come here.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string. `trim`: without it, too."""

    def __init__(self, stops: Sequence[str], trim: bool) -> None:
        self.stopped: str | None = None  # the stop string found; nothing passes after it
        self._matcher = StopMatcher(stops)
        self._trim = trim
        self._held = ""  # may begin a stop string

    def feed(self, text: str) -> str:
        """What of the held text and `text` can be shown; sets `stopped`."""
        if not text:
            return ""
        found = self._matcher.feed(text)
        whole = self._held + text
        if found is None:
            split = len(whole) - self._matcher.num_matched
            self._held = whole[split:]
            return whole[:split]
        self.stopped, after = found
        end = len(self._held) + after
        self._held = ""
        return whole[: end - len(self.stopped) if self._trim else end]

    def finish(self, text: str) -> str:
        """As `feed`, for the last text: then nothing is held back."""
        shown = self.feed(text)
        return shown + self._held


class StopMatcher:
    """Knuth–Morris–Pratt over all stop strings at once: each character is looked at once, however
    long they are.

    The first string to be complete wins, the longest of those complete at the same character; so
    the result does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._failures: tuple[list[int], ...] = tuple([] for _ in self._stops)
        self._matched = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self.num_matched = 0  # characters at the end of the text that may begin a stop string

    def feed(self, text: str) -> tuple[str, int] | None:
        """The stop string completed in `text`, and the number of characters of `text` up to its
        end.
        """
        if self.num_matched == 0 and self._first.isdisjoint(text):
            return None
        matched = self._matched
        for position, letter in enumerate(text):
            complete = ""
            for index, stop in enumerate(self._stops):
                length, failures = matched[index], self._failures[index]
                while length and stop[length] != letter:
                    length = failures[length - 1]
                length += stop[length] == letter
                if length > len(failures):
                    failures.append(_next_failure(stop, failures))
                if length == len(stop):
                    complete, length = max(complete, stop, key=len), failures[length - 1]
                matched[index] = length
            if complete:
                return complete, position + 1
        self.num_matched = max(matched)
        return None


def _next_failure(stop: str, failures: Sequence[int]) -> int:
    """`failures`: for each prefix so far, the length of its longest proper prefix that is also its
    suffix. That of the prefix which is one longer; only those are worked out that a text begins.
    """
    if not failures:
        return 0
    index, length = len(failures), failures[-1]
    while length and stop[index] != stop[length]:
        length = failures[length - 1]
    return length + (stop[index] == stop[length])
