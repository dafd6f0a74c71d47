"""Regular expressions: what ECMA-262 and Python write alike, as a tree, and back into plain text.

One dialect for both backends and for `pattern` in JSON schemas, whatever the libraries make of a
text: \\d and \\w are ASCII, \\s is ECMA's white space, `.` is no line end. What no automaton can
decide (lookaround, backreferences, word boundaries) and what dialects read differently is refused
by name, with its position. `pattern` takes ECMA-262 only: no flags, no (?P<…>). The plain text
holds literals, sets, groups and counts only.
"""

from __future__ import annotations

from jserve.grammar.backend import GrammarError
from jserve.grammar.regex_counts import merge_counts
from jserve.grammar.regex_parser import Parser
from jserve.grammar.regex_sets import ALL, Range
from jserve.grammar.regex_tree import (
    Alt,
    Anchor,
    Chars,
    Node,
    Repeat,
    Seq,
    first_anchor,
    has_anchor,
)

_CARET = ord("^")
_ANYTHING = Repeat(Chars(ALL), 0, None)


def whole_match(text: str) -> str:
    """`text` as plain text that must match from beginning to end; `^` and `$` there change nothing.

    Raises GrammarError.
    """
    return write(merge_counts(_trim(Parser(text).parse(), search=False)))


def search_match(text: str) -> str:
    """`text`, a `pattern` that may match anywhere, as plain text that must match as a whole."""
    return write(merge_counts(_trim(Parser(text, ecma=True).parse(), search=True)))


def escape(text: str) -> str:
    """Plain text that matches `text` alone."""
    return "".join(_char(ord(char)) for char in text)


def write(node: Node) -> str:
    """The tree as plain text."""
    match node:
        case Chars(ranges):
            return _write_set(ranges)
        case Seq(items):
            return "".join(f"(?:{write(i)})" if isinstance(i, Alt) else write(i) for i in items)
        case Alt(options):
            return "|".join(map(write, options))
        case Repeat(item, least, most):
            inner = write(item)
            inner = inner if isinstance(item, Chars) else f"(?:{inner})"
            return inner + _count(least, most)
        case Anchor():
            raise AssertionError(f"{node=} was not trimmed")


def _count(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short:
        return short
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _write_set(ranges: tuple[Range, ...]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    if ranges[0][0] == _CARET:  # xgrammar 0.2 reads a set that starts with ^ as its complement
        rest = ((_CARET + 1, ranges[0][1]),) if ranges[0][1] > _CARET else ()
        ranges = (*rest, *ranges[1:], (_CARET, _CARET))
    parts = (_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _char(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 0x80 else f"\\u{{{code:x}}}"


def _trim(node: Node, search: bool) -> Node:
    """Take the anchors off both ends, and with `search` let anything stand at open ones."""
    node = _trim_end(node, "^", search)
    node = _trim_end(node, "$", search)
    stray = first_anchor(node)
    if stray is not None:
        raise GrammarError(
            f"{stray.sign} at position {stray.position} stands within the regular expression; "
            "anchors are possible at its ends only"
        )
    return node


def _trim_end(node: Node, sign: str, search: bool) -> Node:
    if not has_anchor(node, sign):
        return _open(node, sign) if search else node
    match node:
        case Anchor():
            return Seq(())
        case Alt(options):
            return Alt(tuple(_trim_end(option, sign, search) for option in options))
        case Seq(items) if items:
            at = 0 if sign == "^" else -1
            end = items[at]
            others = items[1:] if sign == "^" else items[:-1]
            if isinstance(end, Anchor) and end.sign == sign:
                return Seq(others)
            if has_anchor(end, sign):
                new = _trim_end(end, sign, search)
                return Seq((new, *others) if sign == "^" else (*others, new))
    return _open(node, sign) if search else node


def _open(node: Node, sign: str) -> Node:
    return Seq((_ANYTHING, node) if sign == "^" else (node, _ANYTHING))
