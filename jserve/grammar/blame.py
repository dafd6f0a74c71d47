"""Which part of a JSON schema a library's refusal is about: it names no place, so the parts are
asked for. Contradictions are contradictions.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jserve.grammar.schema_depth import schemas_within
from jserve.grammar.schema_refs import SchemaRefs

Schema = Mapping[str, Any]

_MOST_ASKED, _MOST_SECONDS = 1000, 1.0  # then the place is one further out
_SHARED = ("$defs", "definitions")
_NOT_ASKED = (*_SHARED, "type")


def blamed(schema: Schema, at: str, reason: str, why: Callable[[Schema], str]) -> str:
    """The innermost place with its keyword, where one is enough: `minimum at #/properties/a`; ""
    when the schema, which is at `at`, is not refused for this reason on its own.

    Args:
    why: asked of a schema on its own; "" when the library takes it.
    """
    refs = SchemaRefs(dict(schema))
    shared = {key: schema[key] for key in _SHARED if key in schema}
    until, left = time.monotonic() + _MOST_SECONDS, _MOST_ASKED

    def is_same(part: Schema) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and time.monotonic() < until and why({**part, **shared}) == reason

    if why(schema) != reason:
        return ""
    node, place, seen = refs.root, at, {id(refs.root)}
    while True:
        named = (key for key in node if key not in _NOT_ASKED and is_same({key: node[key]}))
        keyword = next(named, "")
        inner = (
            (one, where)
            for key, _, one, where in schemas_within(node, place, refs)
            if key == (keyword or key) and isinstance(one, dict) and id(one) not in seen
        )
        found = next(((one, where) for one, where in inner if is_same(one)), None)
        if found is None:
            return f"{keyword} at {place}" if keyword else place
        node, place = found
        seen.add(id(node))
