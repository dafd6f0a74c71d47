"""Where a JSON schema contradicts itself: what a library says of the whole names no place, so its
parts are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.places import escape
from jserve.grammar.schema_refs import SchemaRefs

Schema = Mapping[str, Any]

_PROPERTY = re.compile(r"required property '(.*)' is unsatisfiable")
_FIRST_ITEM = re.compile(r"prefixItems\[(\d+)\] is unsatisfiable")
_WITHIN, _HERE = " while processing ", "json-schema:///"
_MOST_STEPS = 200


def refuse_contradiction(schema: Schema, at: str, why: Callable[[Schema], str]) -> None:
    """Raises GrammarError with the innermost place and reason, if there is one.

    Args:
    why: asked of a schema on its own; "" when some value meets it. At its end the latest `$ref`.
    """
    refs = SchemaRefs(dict(schema))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    node, place, reason = schema, at, why(schema)
    if not reason:
        return
    for _ in range(_MOST_STEPS):  # it may lead in a circle
        reason, _, ref = reason.partition(_WITHIN)
        if ref:
            node, place = refs.find(refs.root, ref.removeprefix(_HERE), at)
        inner, where = _inside(node, place, reason)
        if inner is False:
            place, reason = where, "false allows nothing"
        if not isinstance(inner, dict):
            break
        deeper = why({**inner, **shared})
        if not deeper:
            break
        node, place, reason = inner, where, deeper
    raise GrammarError(f"no value can satisfy it: {reason} at {place}")


def _inside(node: Schema, at: str, reason: str) -> tuple[Any, str]:
    """The part of a schema that is to blame, and its place; None when it is the schema itself."""
    found = _PROPERTY.search(reason)
    if found is not None:
        if found[1] in node.get("properties", ()):
            return node["properties"][found[1]], f"{at}/properties/{escape(found[1])}"
        others = node.get("additionalProperties") or None  # false is said well enough by its name
        return None if "patternProperties" in node else others, f"{at}/additionalProperties"
    found = _FIRST_ITEM.search(reason)
    if found is not None:
        index = int(found[1])
        return node.get("prefixItems", [None])[index], f"{at}/prefixItems/{index}"
    return node.get("items") if "required item is" in reason else None, f"{at}/items"
