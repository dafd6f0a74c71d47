"""A streamed answer as it comes: which variables grow by a piece of it, each by how much.

Refuses to know who reads them (board.py), and where the answer itself goes on (execution.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from jserve.lang.ir import reasoning_name
from jserve.parsers.reasoning import Splitter

#: Variables, and the text that each of them grows by.
Grown = Iterator[tuple[str, str]]


class Pieces(Protocol):
    def push(self, text: str) -> Grown: ...

    def finish(self) -> Grown:
        """What was held back, when the answer is over."""
        ...


class OfNone:
    """Of an answer that no variable keeps."""

    def push(self, text: str) -> Grown:
        return iter(())

    def finish(self) -> Grown:
        return iter(())


class OfOne:
    """All of it is one variable's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> Grown:
        yield self._name, text

    def finish(self) -> Grown:
        return iter(())


class Apart:
    """What the model thought before its answer is another variable's."""

    def __init__(self, name: str, splitter: Splitter) -> None:
        self._names, self._splitter = (reasoning_name(name), name), splitter

    def push(self, text: str) -> Grown:
        return zip(self._names, self._splitter.push(text), strict=True)

    def finish(self) -> Grown:
        rest = zip(self._names, self._splitter.finish(), strict=True)
        return ((name, text) for name, text in rest if text)
