"""Whose turn it is to be compiled: short texts come before long ones, and do not wait for those
that run. Knows sizes and times, nothing of grammars and processes.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

SHORT = 16 << 10  # characters: such texts mostly take milliseconds
NUM_EXTRA = 2  # short ones that may run beside as many as may otherwise
_PATIENCE = 0.5  # seconds that these have run by then
_MOST_OVERTAKEN = 5.0  # seconds that a long one waits for short ones that came later
_POLL = 0.05

_T = TypeVar("_T")


class Turns(Generic[_T]):
    """At most `most` items run at a time, and NUM_EXTRA more that are short while all of the others
    have been running for a while. As many threads take as items are put; for each that was taken
    back one gets None.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._changed = threading.Condition()  # guards all below
        self._short: collections.deque[_T] = collections.deque()
        self._long: collections.deque[tuple[_T, float]] = collections.deque()  # put at that time
        self._running: list[float] = []  # since when
        self._num_taken_back = 0  # that no thread has heard of yet

    @property
    def crowded(self) -> bool:
        """Somebody waits until one of those that run is over."""
        full = len(self._running) >= self._most + NUM_EXTRA
        return bool(self._long) or (full and bool(self._short))

    def put(self, item: _T, size: int) -> None:
        with self._changed:
            if size <= SHORT:
                self._short.append(item)
            else:
                self._long.append((item, self._clock()))
            self._changed.notify()

    def take_back(self, item: _T) -> bool:
        """Nobody wants it any more; False when it was taken already."""
        with self._changed:
            put = next((one for one in self._long if one[0] == item), None)
            if put is not None:
                self._long.remove(put)
            elif item in self._short:
                self._short.remove(item)
            else:
                return False
            self._num_taken_back += 1
            self._changed.notify()
            return True

    def take(self) -> tuple[_T, float] | None:
        """Wait for the next item; the second is for `give`, when it is over."""
        with self._changed:
            while (found := self._due()) is None:
                if self._num_taken_back:
                    self._num_taken_back -= 1
                    return None
                self._changed.wait(_POLL)
            self._running.append(self._clock())
            return found, self._running[-1]

    def give(self, since: float) -> None:
        with self._changed:
            self._running.remove(since)
            self._changed.notify()

    def _due(self) -> _T | None:
        now, room = self._clock(), self._most - len(self._running)
        if room > 0 and self._long:
            item, put = self._long[0]
            if not self._short or now - put > _MOST_OVERTAKEN:
                self._long.popleft()
                return item
        beside = room + NUM_EXTRA > 0 and all(now - one >= _PATIENCE for one in self._running)
        return self._short.popleft() if self._short and (room > 0 or beside) else None
