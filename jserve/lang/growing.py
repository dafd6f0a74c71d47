"""Text that grows by pieces: adding one costs its own length, however much there is already.

Knows no threads; who shares it holds a lock.
"""

from __future__ import annotations

import bisect


class GrowingText:
    """`whole` puts the pieces together; what `since` gives is read from those that it covers. The
    `text` it begins with stays by itself: many that begin with the same one hold it once."""

    __slots__ = ("_ends", "_pieces")

    def __init__(self, text: str = "") -> None:
        self._pieces, self._ends = [text], [len(text)]

    def __len__(self) -> int:
        return self._ends[-1]

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._ends.append(self._ends[-1] + len(piece))

    def since(self, position: int) -> str:
        """What stands behind the first `position` characters."""
        first = bisect.bisect_right(self._ends, position)
        if first == len(self._ends):
            return ""
        begun = position - self._ends[first] + len(self._pieces[first])
        return "".join((self._pieces[first][begun:], *self._pieces[first + 1 :]))

    @property
    def whole(self) -> str:
        begun, *added = self._pieces
        if len(added) > 1:
            added = ["".join(added)]
            self._pieces, self._ends = [begun, *added], [self._ends[0], self._ends[-1]]
        return begun + added[0] if added else begun
