"""What callers say of an answer's syntax → the fields of SamplingParams that carry it.

Owns their names and forms, the same ones on every surface; whether a grammar can be enforced is
found when it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jserve.errors import RequestError
from jserve.grammar.backend import GrammarError
from jserve.grammar.spec import JSON_OBJECT, choice_spec

#: json_schema and structural_tag may be objects, choices is a list, json_object true or false.
NAMES = ("json_schema", "regex", "ebnf", "structural_tag", "choices", "json_object")


def syntax_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The one of NAMES that asks for something, as a field of SamplingParams; {} when none does.

    None, false and what is empty ask for nothing, but the schema {}, which is any JSON. Raises
    RequestError naming the field.
    """
    asked = {name: given[name] for name in NAMES if _asks(name, given.get(name))}
    if not asked:
        return {}
    if len(asked) > 1:
        first, second, *_ = asked
        raise RequestError(f"{first} and {second} cannot both hold; give one of them.", second)
    ((name, value),) = asked.items()
    if name == "choices":
        try:
            return {"regex": choice_spec(value if isinstance(value, list) else [value]).text}
        except GrammarError:
            rule = "choices must be a list of strings that are not empty"
            raise RequestError(f"{rule}, got {value!r}.", name) from None
    if name == "json_object":
        if value is not True:
            raise RequestError(f"json_object must be true or false, got {value!r}.", name)
        return {"json_schema": JSON_OBJECT.text}
    if isinstance(value, Mapping | bool) and name in ("json_schema", "structural_tag"):
        return {name: json.dumps(value, ensure_ascii=False)}
    if not isinstance(value, str):
        also = " or an object" if name in ("json_schema", "structural_tag") else ""
        raise RequestError(f"{name} must be a string{also}, got {value!r}.", name)
    return {name: value}


def _asks(name: str, value: Any) -> bool:
    if name == "json_schema" and isinstance(value, Mapping | bool):
        return value is not False
    return value is not None and value is not False and value != "" and value != [] and value != {}
