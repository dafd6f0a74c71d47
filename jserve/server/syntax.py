"""OpenAI's response_format, and the extra fields beside it, as parameters of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.engine.syntax import NAMES, syntax_fields
from jserve.errors import RequestError
from jserve.server.bodies import OpenAIBody

_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def answer_syntax(body: OpenAIBody) -> dict[str, Any]:
    """Fields of SamplingParams. Raises RequestError naming the field."""
    given = {name: getattr(body, name) for name in NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    if not body.json_object:
        del given["json_object"]
    asked, field = _response_format(body.response_format or {})
    if asked and given:
        name = next(iter(given))
        message = f"response_format and {name} cannot both hold; give one of them."
        raise RequestError(message, "response_format")
    return syntax_fields(asked or given) | ({"syntax_field": field} if asked else {})


def _response_format(form: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What it asks for, as one of NAMES, and the field that does."""
    kind = form.get("type", "text" if not form else None)
    if kind not in _TYPES:
        message = f"response_format.type must be one of {', '.join(_TYPES)}, got {kind!r}."
        raise RequestError(message, "response_format.type")
    if kind != "json_schema":
        forms = {"json_object": True, "structural_tag": dict(form)}
        return {kind: forms[kind]} if kind in forms else {}, "response_format"
    named, where = form.get("json_schema"), "response_format.json_schema.schema"
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"{where} must be a JSON schema, got {schema!r}.", where)
    return {"json_schema": schema}, where
