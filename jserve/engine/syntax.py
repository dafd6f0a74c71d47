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
from jserve.grammar.places import value_too_deep
from jserve.grammar.spec import JSON_OBJECT, choice_spec

#: json_schema and structural_tag may be objects, choices is a list, json_object true or false.
NAMES = ("json_schema", "regex", "ebnf", "structural_tag", "choices", "json_object")


def syntax_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The one of NAMES that is given, as fields of SamplingParams; {} when none is.

    Null asks for nothing, and so does json_object: false. Raises RequestError naming the field.
    """
    asked = {name: given[name] for name in NAMES if given.get(name) is not None}
    if asked.get("json_object") is False:
        del asked["json_object"]
    if not asked:
        return {}
    if len(asked) > 1:
        first, second, *_ = asked
        raise RequestError(f"{first} and {second} cannot both hold; give one of them.", second)
    ((name, value),) = asked.items()
    if name == "choices":
        try:
            text = choice_spec(value if isinstance(value, list) else []).text
            return {"regex": text, "syntax_field": name}
        except (GrammarError, TypeError):
            rule = "choices must be a list of strings, and none of them empty"
            raise RequestError(f"{rule}, got {value!r}.", name) from None
    if name == "json_object":
        if value is not True:
            raise RequestError(f"json_object must be true or false, got {value!r}.", name)
        return {"json_schema": JSON_OBJECT.text, "syntax_field": name}
    if name == "json_schema" and isinstance(value, Mapping | bool):
        return {name: _as_text(name, value)}
    if name == "structural_tag" and isinstance(value, Mapping):
        return {name: _as_text(name, value)}
    if not isinstance(value, str):
        also = " or an object" if name in ("json_schema", "structural_tag") else ""
        raise RequestError(f"{name} must be a string{also}, got {value!r}.", name)
    if not value:
        raise RequestError(f"{name} must not be empty; leave it out, or give null.", name)
    return {name: value}


def _as_text(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{name}: {value_too_deep(value)}.", name) from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} must be JSON: {error}.", name) from None
