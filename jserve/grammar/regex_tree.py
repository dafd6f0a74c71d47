"""Regular expressions as trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jserve.grammar.regex_sets import Range


@dataclasses.dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: tuple[Range, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`, where it stands in the text."""

    sign: str
    position: int


Node = Chars | Seq | Alt | Repeat | Anchor


def has_anchor(node: Node, sign: str) -> bool:
    return any(anchor.sign == sign for anchor in anchors(node))


def first_anchor(node: Node) -> Anchor | None:
    return next(iter(anchors(node)), None)


def anchors(node: Node) -> Iterable[Anchor]:
    match node:
        case Anchor():
            yield node
        case Seq(nodes) | Alt(nodes):
            for inner in nodes:
                yield from anchors(inner)
        case Repeat(item):
            yield from anchors(item)
        case Chars():
            pass
