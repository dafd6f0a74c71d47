"""Words for messages about what a caller sent: the name that was meant, types, and whether a text
can be written at all.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

_PLAIN = {
    "array": "list",
    "bool": "boolean",
    "float": "number",
    "int": "integer",
    "str": "string",
}


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """The one of `known` that was probably meant by `name`."""
    near = difflib.get_close_matches(name[:100], known, n=1)
    return near[0] if near else None


def lone_surrogate(text: str) -> bool:
    """Whether it holds half of a pair, which no UTF-8 has: Python's texts and JSON's may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def written(value: object) -> str:
    """Its repr(), for a message; Python writes no integer of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} with thousands of digits"


def plain_types(problem: str) -> str:
    """msgspec's words for what is wrong, without its marks and Python's names of types."""

    def plain(marked: re.Match[str]) -> str:
        return " or ".join(_PLAIN.get(kind, kind) for kind in marked[1].split(" | "))

    return re.sub("`([^`]*)`", plain, problem)
