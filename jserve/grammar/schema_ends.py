"""JSON schemas that no finite value can meet, because what they require leads back to themselves.

    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

No library notices: an answer would be opened again and again. Contradictions are left to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.schema_refs import SchemaRefs

Schema = dict[str, Any]
Ends = Callable[[Any], bool]


def check_ends(nodes: Sequence[tuple[Schema, str]], refs: SchemaRefs) -> None:
    """`nodes` are all schemas that an instance can meet, from the root on, and their places. Raises
    GrammarError for the first one that has no end; which are found to have one adds up."""
    known = {id(node) for node, _ in nodes}
    found: set[int] = set()

    def ends(schema: Any) -> bool:
        return id(schema) in found or id(schema) not in known

    more = True
    while more:
        before = len(found)
        for node, _ in reversed(nodes):  # what is within comes behind
            if id(node) not in found and _has_end(node, refs, ends):
                found.add(id(node))
        more = len(found) > before
    for node, at in nodes:
        if id(node) not in found:
            raise GrammarError(
                f"no text can satisfy it: what {at} requires leads back to itself without an end"
            )


def _has_end(node: Schema, refs: SchemaRefs, ends: Ends) -> bool:
    if "$ref" in node and not ends(refs.find(node, node["$ref"], "")[0]):
        return False
    if not all(map(ends, node.get("allOf", ()))):
        return False
    if not all(any(map(ends, node[key])) for key in ("anyOf", "oneOf") if key in node):
        return False
    kind = node.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    return kinds is None or any(_KINDS.get(one, _always)(node, ends) for one in kinds)


def _always(node: Schema, ends: Ends) -> bool:
    return True


def _object(node: Schema, ends: Ends) -> bool:
    properties, others = node.get("properties", {}), node.get("additionalProperties", True)
    if "patternProperties" in node:
        others = True  # it may be one of those
    return all(ends(properties.get(name, others)) for name in node.get("required", ()))


def _array(node: Schema, ends: Ends) -> bool:
    least, items = node.get("minItems", 0), node.get("items", True)
    first = items if isinstance(items, list) else node.get("prefixItems", [])
    more = node.get("additionalItems", True) if isinstance(items, list) else items
    return all(map(ends, first[:least])) and (least <= len(first) or ends(more))


_KINDS = {"object": _object, "array": _array}
