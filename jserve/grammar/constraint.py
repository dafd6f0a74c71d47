"""One answer's way through its grammar, and through the thinking before it.

Knows tokens and a matcher. What a step may draw by it is masks.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jserve.grammar.backend import Matcher
from jserve.types import Thinking


@dataclasses.dataclass(slots=True)
class Constraint:
    """A request's matcher, and how many of its output tokens have been seen.

    `thinking` is set until that has ended; the matcher sees what comes behind it.
    """

    matcher: Matcher
    ends: Collection[int]  # the model's EOS ids
    thinking: Thinking | None = None
    num_seen: int = 0
    closed: bool = False  # EOS was taken

    @property
    def opening(self) -> int | None:
        """The token that begins to think where the answer may begin too."""
        return self.thinking.begin if self.thinking and self.num_seen == 0 else None

    @property
    def free(self) -> bool:
        """Whether the next token is a thought. An answer must not end in those."""
        return self.thinking is not None and self.opening is None

    def advance(self, output_ids: Sequence[int]) -> int | None:
        """Bring the matcher up to `output_ids`; → a token that it rejects, None if it takes all."""
        while self.num_seen < len(output_ids):
            token = output_ids[self.num_seen]
            if self.opening not in (None, token):
                self.thinking = None  # it answers at once
            if self.thinking is None:
                if self.closed or not self._take(token):
                    return token
            elif token in self.ends:
                return token
            elif _ends_with(output_ids, self.num_seen + 1, self.thinking.end):
                self.thinking = None
            self.num_seen += 1
        return None

    def _take(self, token: int) -> bool:
        if token not in self.ends:
            return not self.matcher.finished and self.matcher.accept(token)
        # one that has nothing more to allow does not wait for EOS
        self.closed = self.matcher.finished or self.matcher.accept(token)
        return self.closed


def _ends_with(ids: Sequence[int], length: int, end: tuple[int, ...]) -> bool:
    """Whether the first `length` ids end with `end`."""
    return length >= len(end) and tuple(ids[length - len(end) : length]) == end
