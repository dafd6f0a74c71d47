"""Counts in regular expressions: those that say what one says become one, and how many places an
expression has with its counts written out.

    (x{1,100}){1,10} → x{1,1000}      x{1,20}x{3} → x{4,23}

A library that follows a text by derivatives keeps every way in which nested counts can have been
used so far: thousands where one count would do.
"""

from __future__ import annotations

from jserve.grammar.regex_tree import Alt, Node, Repeat, Seq

_MOST = 999_999  # what the parser takes as a count


def merge_counts(node: Node) -> Node:
    """The same texts, with fewer counts."""
    match node:
        case Seq(items):
            return _row([merge_counts(item) for item in items])
        case Alt(options):
            return Alt(tuple(merge_counts(option) for option in options))
        case Repeat(item, least, most):
            return _nested(Repeat(merge_counts(item), least, most))
    return node


def num_places(node: Node) -> int:
    """Characters, each as often as the counts around it can have it; one that is open counts for
    its least."""
    match node:
        case Seq(nodes) | Alt(nodes):
            return sum(map(num_places, nodes))
        case Repeat(item, least, most):
            return num_places(item) * max(least if most is None else most, 1)
    return 1


def _nested(outer: Repeat) -> Repeat:
    """With k repetitions a·k to b·k items are possible. Where these ranges leave no gap from one k
    to the next, they are one range; the first two are the ones farthest apart."""
    inner, c, d = outer.item, outer.least, outer.most
    if not isinstance(inner, Repeat) or 0 in (inner.most, d):
        return outer
    a, b = inner.least, inner.most
    gapless = c == d or (a <= 1 if c == 0 else b is None or a * (c + 1) <= b * c + 1)
    most = None if b is None or d is None else b * d
    if not gapless or max(a * c, most or 0) > _MOST:
        return outer
    return Repeat(inner.item, a * c, most)


def _row(items: list[Node]) -> Node:
    """Neighbours that repeat the same are one."""
    merged: list[Node] = []
    for item in items:
        last = merged[-1] if merged else None
        if last is not None and Repeat in (type(last), type(item)):
            one, two = _repeated(last), _repeated(item)
            most = None if one.most is None or two.most is None else one.most + two.most
            least = one.least + two.least
            if one.item == two.item and max(least, most or 0) <= _MOST:
                merged[-1] = Repeat(one.item, least, most)
                continue
        merged.append(item)
    return merged[0] if len(merged) == 1 else Seq(tuple(merged))


def _repeated(node: Node) -> Repeat:
    return node if isinstance(node, Repeat) else Repeat(node, 1, 1)
