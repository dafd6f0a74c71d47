"""Sets of characters as ranges of code points, and the named ones of regular expressions."""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Iterable

Range = tuple[int, int]  # code points, both included

ALL: tuple[Range, ...] = ((0, 0xD7FF), (0xE000, sys.maxunicode))  # no surrogates
LINE_ENDS: tuple[Range, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_DIGIT: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: tuple[Range, ...] = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
#: By the letter of its escape.
ESCAPED = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
#: Long names of Unicode's general categories that ECMA-262 knows.
_CATEGORIES = {
    **{"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M"},
    **{"Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P", "punct": "P"},
    **{"Symbol": "S", "Separator": "Z", "Space_Separator": "Zs", "Control": "Cc", "cntrl": "Cc"},
}


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    found: list[Range] = []
    start = 0
    for low, high in union([*ranges, (0xD800, 0xDFFF)]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= sys.maxunicode:
        found.append((start, sys.maxunicode))
    return tuple(found)


@functools.cache
def category(name: str) -> tuple[Range, ...]:
    """Code points whose general category is `name` or one of its kinds; nothing if unknown."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    name = _CATEGORIES.get(name, name)
    if not name or len(name) > 2:
        return ()
    return union(
        (code, code)
        for code in range(sys.maxunicode + 1)
        if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)).startswith(name)
    )
