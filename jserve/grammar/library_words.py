"""What a grammar library says is wrong, in words for who sent the grammar: without its own states,
options and sources, and with what can be done.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: Where llguidance begins to show its source or its state.
_SOURCE = re.compile(r"\s+(?:\d+ \|\s|<state>|<grammar>)")
#: In front of what is wrong, one behind the other.
_PREFIXES = (
    r"\w*Error: ",
    r"(?:at )?\d+\(\d+\): ",
    r"failed to compile JSON schema: ",
    r"Check failed: .*? is false: ",
    r"Invalid structural tag error: ",
)
_PATTERN = "which is too large or too complex; shorten it, or lower its counts"

Words = str | Callable[[re.Match[str]], str]

_KNOWN: tuple[tuple[str, Words], ...] = (
    (
        r"maximum number of nested parentheses",
        "it has a pattern with too many repeated groups in each other; about 80 are possible",
    ),
    (
        r"Current row has (\d+) items; max is (\d+)",
        lambda found: (
            f"at one place {found[1]} things could come next, and at most {found[2]} may: an "
            "object may declare about 500 optional properties, and a choice about 2000 "
            "alternatives that begin alike; require properties, nest them in objects, or split "
            "the grammar"
        ),
    ),
    (
        r"NoExtensionBias|cannot be accepted|Unsatisfiable grammar",
        "no text can satisfy it, because what it says leads back to itself without an end",
    ),
    (
        r"oneOf constraints are not supported",
        "oneOf can be enforced only where a type or a constant tells its alternatives apart; "
        "use anyOf",
    ),
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties can be enforced only where all declared properties are "
        "required",
    ),
    (
        r"patternProperty regexes .* are not disjoint",
        "patternProperties can be enforced only where no two patterns match one name; anchor them "
        "(^a, ^b)",
    ),
    (
        r"Value for 'multipleOf' has too many digits",
        "multipleOf has too many digits to be enforced",
    ),
    (
        r"Failed to generate regex for (?:float|integer) range",
        "minimum and maximum are no range that can be enforced; numbers must be below 1e16",
    ),
    (
        r"Regex is empty",
        "its pattern, format and lengths exclude each other",
    ),
    (r"Unsatisfiable schema: (.*)", lambda found: f"no value can satisfy it: {found[1]}"),
    (
        r"Resource '(.*?)' is not present in a registry",
        lambda found: (
            f"it refers to {found[1]}, and nothing is fetched; leave $schema out or name a draft "
            "of JSON Schema, and give what $ref names under $defs"
        ),
    ),
    (r"circular", "a circular $ref with keywords beside it cannot be enforced; put them elsewhere"),
    (
        r"[Ss]chema intersection|schema too deep|intersection.*depth",
        "allOf and $ref make an intersection that is too deep to be enforced; merge its parts",
    ),
    (r"lexer configuration .*too big|[Rr]egex.*too (?:large|big)", f"it has a pattern {_PATTERN}"),
    (
        r"[Uu]nable to determine if regex is empty|fuel|too many (?:expressions|states)",
        f"it has a pattern {_PATTERN}",
    ),
    (
        r"schema too large",
        "what allOf, anyOf and $ref combine to is too large; merge some of their parts",
    ),
    (
        r"too large|[Tt]oo many items",
        "it is too large; split it",
    ),
)
#: Of JSON that is too deep for a library to read: see places.py.
TOO_DEEP = re.compile(r"recursion limit exceeded|recursion depth|nested deeper than")


def plain_words(message: str) -> str:
    """One line, of at most 400 characters."""
    text = _SOURCE.split(" ".join(message.split()), maxsplit=1)[0]
    for prefix in _PREFIXES:
        text = re.sub(f"^{prefix}", "", text)
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            text = words if isinstance(words, str) else words(found)
            break
    return text.rstrip(" .")[:400]
