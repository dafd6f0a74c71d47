"""Which sizes of a step exist, and which programs serve a step, best first.

Knows nothing of plans, models or how a program is compiled.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

#: (full sampler, logprobs) of the head's variants; each does what those before it do, and more.
HEADS = ((False, False), (True, False), (True, True))


class Key(NamedTuple):
    """Names one program; `variant` is mixed for forward, the full sampler for head."""

    name: str
    size: int = 0
    variant: bool = False
    logprobs: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes of a step: powers of two, so that padding at most doubles it, and the largest size.

    `rows`: decode rows, and rows that sample, from `least` on. `tokens`: of a mixed step, decode
    rows included, whose rows are always num_slots; the largest is the chunk.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, num_slots: int, chunk: int, least: int = 1) -> Buckets:
        top = max(2, chunk)  # a step of one token is a decode step
        return cls((*_powers(least, num_slots), num_slots), (*_powers(2, top), top))

    @property
    def num_slots(self) -> int:
        return self.rows[-1]

    def forwards(self, mixed: bool, size: int) -> Iterator[Key]:
        """Forwards that hold `size` tokens, the smallest first."""
        for held in at_least(self.tokens if mixed else self.rows, size):
            yield Key("forward", held, mixed)

    def heads(self, rows: int, full: bool, logprobs: bool) -> Iterator[Key]:
        """Heads that hold `rows` and do what is asked: exact variants, then those that do more."""
        for variant in HEADS[2 if logprobs else int(full) :]:
            for held in at_least(self.rows, rows):
                yield Key("head", held, *variant)


def first_ready(keys: Iterable[Key], ready: Container[Key]) -> Key:
    """The best one that is `ready` of programs that all serve; the last of them always is."""
    return next(key for key in keys if key in ready)


def at_least(sizes: Sequence[int], size: int) -> Sequence[int]:
    """The sizes that hold `size`, smallest first; never empty."""
    assert size <= sizes[-1], f"{size=} {sizes=}"
    return sizes[bisect.bisect_left(sizes, size) :]


def _powers(first: int, below: int) -> Iterator[int]:
    size = first
    while size < below:
        yield size
        size *= 2
