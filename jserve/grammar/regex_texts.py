"""The texts that a regular expression matches, where they are few."""

from __future__ import annotations

from collections.abc import Iterable

from jserve.grammar.regex_tree import Alt, Anchor, Chars, Node, Repeat, Seq

_MOST_CHARACTERS = 10_000  # of all texts together


class _TooMany(Exception):
    pass


def few_texts(node: Node, most: int) -> frozenset[str] | None:
    """All texts that match as a whole; None if they, or those of a part, are more than `most`."""
    try:
        return _texts(node, most)
    except _TooMany:
        return None


def _texts(node: Node, most: int) -> frozenset[str]:
    match node:
        case Chars(ranges):
            if sum(high - low + 1 for low, high in ranges) > most:
                raise _TooMany
            return frozenset(chr(i) for low, high in ranges for i in range(low, high + 1))
        case Alt(options):
            return _few((text for option in options for text in _texts(option, most)), most)
        case Seq(items):
            found = frozenset([""])
            for item in items:
                found = _joined(found, _texts(item, most), most)
            return found
        case Repeat(item, least, end):
            return _repeated(_texts(item, most), least, end, most)
        case Anchor():  # at an end
            return frozenset([""])


def _repeated(texts: frozenset[str], least: int, end: int | None, most: int) -> frozenset[str]:
    if end is None and texts - {""}:
        raise _TooMany
    latest = found = frozenset([""])
    for i in range(1, (least if end is None else end) + 1):
        joined = _joined(latest, texts, most)
        found = joined if i <= least else _few((*found, *joined), most)
        if joined == latest:
            break  # and so it stays
        latest = joined
    return found


def _joined(left: frozenset[str], right: frozenset[str], most: int) -> frozenset[str]:
    return _few((one + two for one in left for two in right), most)


def _few(texts: Iterable[str], most: int) -> frozenset[str]:
    found, size = set[str](), 0
    for text in texts:
        if text not in found:
            found.add(text)
            size += len(text)
            if len(found) > most or size > _MOST_CHARACTERS:
                raise _TooMany
    return frozenset(found)
