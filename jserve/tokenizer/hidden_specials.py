"""Looks for a request's stops in all its text, special tokens that nobody sees too. It knows no
tokens, only which text is hidden. Requests without stops never come here.
"""

from __future__ import annotations

import collections

from jserve.tokenizer.stop_regex import RegexFilter, text_filter
from jserve.tokenizer.stop_strings import StopFilter
from jserve.types import SamplingParams


class HiddenSpecials:
    """Lets through what is to be seen of what a filter lets through."""

    def __init__(self, stops: StopFilter | RegexFilter) -> None:
        self._stops = stops
        self._num_fed = 0  # characters
        self._num_passed = 0  # of those
        self._hidden: collections.deque[tuple[int, int]] = collections.deque()  # not passed yet

    @property
    def stopped(self) -> str | None:
        return self._stops.stopped

    def feed(self, text: str, hidden: str) -> str:
        """What can be shown of `text`, and of what was held back. `hidden` comes behind `text`."""
        begin = self._num_fed + len(text)
        self._num_fed = begin + len(hidden)
        if hidden:
            self._hidden.append((begin, self._num_fed))
        return self._seen(self._stops.feed(text + hidden))

    def finish(self, text: str) -> str:
        """As `feed`, for the last text: then nothing is held back."""
        return self._seen(self._stops.finish(text))

    def _seen(self, passed: str) -> str:
        begin = at = self._num_passed
        self._num_passed = end = begin + len(passed)
        seen = []
        while self._hidden and self._hidden[0][0] < end:
            first, last = self._hidden.popleft()
            seen.append(passed[at - begin : max(at, first) - begin])
            at = min(last, end)
            if last > end:  # the rest of it may begin a stop
                self._hidden.appendleft((end, last))
                break
        seen.append(passed[at - begin :])
        return "".join(seen)


def stops_of(sampling: SamplingParams) -> HiddenSpecials:
    """What looks for the stops of a request that has some."""
    return HiddenSpecials(text_filter(sampling))
