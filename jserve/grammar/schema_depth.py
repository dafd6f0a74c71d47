"""How deep schemas lie in each other, those that `$ref` leads to among them. Libraries go into them
one by one, each on its part of a stack, and a process whose stack is full ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.places import escape
from jserve.grammar.schema_refs import SchemaRefs

Schema = dict[str, Any]

#: A stack of 2 MB holds 420 lists with their items by turns, and more of others.
MOST_DEEP = 300
#: Keywords whose value is a schema, a list of them, and a mapping to them.
_SCHEMAS = frozenset({"additionalProperties", "items", "additionalItems"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties"})


def check_depth(root: Schema, at: str, refs: SchemaRefs) -> None:
    """`root` is at `at`. Raises GrammarError for the first schema that is too deep, as one comes to
    it who enters each where it is met first."""
    met = {id(root)}
    open_ = [schemas_within(root, at, refs)]
    while open_:
        keyword, place, node, inner = next(open_[-1], ("", "", None, ""))
        if node is None:
            open_.pop()
        elif isinstance(node, dict) and id(node) not in met:
            if len(open_) == MOST_DEEP:
                raise GrammarError(
                    f"{keyword} at {place} leads more than {MOST_DEEP} schemas deep, each within "
                    "the one before or named by its $ref; let a $ref name what the next ones lead "
                    "to, and make the schema flatter"
                )
            met.add(id(node))
            open_.append(schemas_within(node, inner, refs))


def schemas_within(node: Schema, at: str, refs: SchemaRefs) -> Iterator[tuple[str, str, Any, str]]:
    """Keyword and place; the schema there and its own place."""
    for keyword, value in node.items():
        if keyword == "$ref" and isinstance(value, str):
            yield (keyword, at, *refs.find(node, value, at))
        elif keyword in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield keyword, at, one, f"{at}/{keyword}/{escape(name)}"
        elif keyword in _LISTS and isinstance(value, list):
            for i, one in enumerate(value):
                yield keyword, at, one, f"{at}/{keyword}/{i}"
        elif keyword in _SCHEMAS:
            yield keyword, at, value, f"{at}/{keyword}"
