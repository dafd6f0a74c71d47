"""What the values of JSON Schema's keywords must look like, so that a malformed schema is refused
by keyword and place. What a well-formed one means is schema_check.py's, and so is to look inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jserve.grammar.backend import GrammarError

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
Holds = Callable[[Any], bool]


def check_shapes(node: Mapping[str, Any], at: str) -> None:
    """Raises GrammarError for the first keyword of this schema whose value is of another form."""
    for keyword, value in node.items():
        rule = _SHAPES.get(keyword)
        if rule is not None and not rule[0](value):
            got = json.dumps(value, ensure_ascii=False)[:60]
            raise GrammarError(f"{keyword} at {at} must be {rule[1]}, got {got}")


def _number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and value == math.floor(value)


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


def _map(value: Any) -> bool:
    return isinstance(value, dict)


def _schema_map(value: Any) -> bool:
    return _map(value) and all(map(_schema, value.values()))


def _texts_map(value: Any) -> bool:
    return _map(value) and all(map(_texts, value.values()))


def _dependencies(value: Any) -> bool:
    return _map(value) and all(_texts(one) or _schema(one) for one in value.values())


_TEXT = (lambda value: isinstance(value, str), "a string")
_COUNT = (_count, "an integer of at least 0")
_NUMBER = (_number, "a number")
_LIMIT = (lambda value: _number(value) or isinstance(value, bool), "a number")  # draft 4: a switch
_SCHEMAS = (_full_list, "a list with at least one schema")
_SCHEMA = (_schema, "a schema")
_MAP = (_map, "an object of schemas")

_SHAPES: Mapping[str, tuple[Holds, str]] = {
    "type": (_type, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (_full_list, "a list with at least one value"),
    "required": (_texts, "a list of strings"),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    "items": (lambda value: isinstance(value, dict | bool | list), "a schema"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "dependentRequired": (_texts_map, "an object of lists of strings"),
    "dependentSchemas": (_schema_map, "an object of schemas"),
    "dependencies": (_dependencies, "an object of schemas and of lists of strings"),
    **dict.fromkeys(("additionalItems", "additionalProperties", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "contains"), _SCHEMA),
    **dict.fromkeys(("if", "then", "else", "not"), _SCHEMA),
    **dict.fromkeys(("$ref", "pattern", "format", "$schema"), _TEXT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties"), _MAP),
}
