"""Texts and sets in GBNF as code points. Knows nothing of the rules that they stand in."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jserve.grammar.backend import GrammarError
from jserve.grammar.regex_sets import ALL, Range, complement

_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"t": 9, "n": 10, "r": 13, "v": 11, "f": 12, "a": 7, "b": 8, "e": 27, "0": 0}
_SURROGATES = (0xD800, 0xDFFF)


def refusal(grammar: str, what: str, at: int) -> GrammarError:
    """`at` is the position of `what` in the grammar."""
    line = grammar.count("\n", 0, at) + 1
    column = at - grammar.rfind("\n", 0, at)
    return GrammarError(f"the grammar has {what} in line {line}, column {column}")


def codes_of(grammar: str, start: int, end: int) -> list[tuple[int, bool]]:
    """Code points between these positions, and whether they were escaped. Raises GrammarError."""
    codes: list[tuple[int, bool]] = []
    for found in _ESCAPE.finditer(grammar, start, end):
        *numbers, escaped, plain = found.groups()
        number = next((one for one in numbers if one), None)
        if plain:
            code = ord(plain)
        elif number is not None:
            code = int(number, 16)
        elif escaped in _CONTROLS:
            code = _CONTROLS[escaped]
        elif escaped.isascii() and escaped.isalnum():
            raise refusal(grammar, f"the escape \\{escaped}", found.start())
        else:
            code = ord(escaped)
        if code > ALL[-1][1] or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise refusal(grammar, f"the code point {code:x}", found.start())
        codes.append((code, not plain))
    return codes


def ranges_of(grammar: str, start: int, end: int) -> tuple[Range, ...]:
    """The characters of the set whose brackets enclose these positions. Raises GrammarError."""
    negated = grammar.startswith("^", start, end)
    others = complement(_as_written(grammar, start + negated, end))
    found = others if negated else complement(others)  # no surrogates in either
    if not found:
        raise refusal(grammar, "a set of nothing", start)
    return found


def rewritten(grammar: str, start: int, end: int) -> str:
    """The text or the set there, quotes and brackets included, for xgrammar: it takes surrogates
    for characters that a set spans or does not exclude, and of \\x all digits that follow, where
    GBNF has two. Raises GrammarError."""
    if grammar[start] == "[":
        ranges = ranges_of(grammar, start + 1, end - 1)
        if grammar[start + 1] == "^" or _spans(_as_written(grammar, start + 1, end - 1)):
            written = (f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
            return f"[{''.join(written)}]"
    else:
        codes_of(grammar, start + 1, end - 1)
    text = grammar[start:end]
    return _ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)


def _as_written(grammar: str, start: int, end: int) -> list[Range]:
    codes = codes_of(grammar, start, end)
    ranges: list[Range] = []
    while codes:
        low, _ = codes.pop(0)
        if len(codes) > 1 and codes[0] == (ord("-"), False):
            high, _ = codes[1]
            del codes[:2]
            if high < low:
                raise refusal(grammar, "a range that goes backwards", start)
            ranges.append((low, high))
        else:
            ranges.append((low, low))
    return ranges


def _spans(ranges: Iterable[Range]) -> bool:
    return any(low < _SURROGATES[0] and high > _SURROGATES[1] for low, high in ranges)
