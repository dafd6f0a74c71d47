"""OpenAI's response_format, and the extra fields beside it, as parameters of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.engine.syntax import NAMES, syntax_fields
from jserve.errors import RequestError
from jserve.server.bodies import OpenAIBody

#: By its type, the fields that response_format has beside that.
_FIELDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("format",),
}
_NAMED: dict[str, Any] = {"name": str, "description": str, "schema": Mapping | bool, "strict": bool}
#: A structural tag in its older form; what structures hold is jserve/grammar's to check.
_OLDER = ("structures", "triggers", "at_least_one", "stop_after_first", "excludes")
_WORDS = {str: "a string", bool: "true or false", Mapping | bool: "a JSON schema"}
_SCHEMA_FORM = '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}'


def answer_syntax(body: OpenAIBody) -> dict[str, Any]:
    """Fields of SamplingParams. Raises RequestError naming the field."""
    given = {name: getattr(body, name) for name in NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    if not body.json_object:
        del given["json_object"]
    asked, field = ({}, "") if (form := body.response_format) is None else _response_format(form)
    if asked and given:
        name = next(iter(given))
        message = f"response_format and {name} cannot both hold; give one of them."
        raise RequestError(message, "response_format")
    return syntax_fields(asked or given) | ({"syntax_field": field} if asked else {})


def _response_format(form: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What it asks for, as one of NAMES, and the field that does. A null is no field."""
    form, where = _without_nulls(form), "response_format"
    kind, kinds = form.pop("type", None), ", ".join(_FIELDS)
    if kind is None:
        raise RequestError(f"{where}.type is missing; send one of {kinds}.", f"{where}.type")
    if kind not in list(_FIELDS):
        message = f"{where}.type must be one of {kinds}, got {kind!r}."
        raise RequestError(message, f"{where}.type")
    if kind == "json_schema":
        return _named_schema(form)
    older = kind == "structural_tag" and "structures" in form
    _refuse_others(form, _OLDER if older else _FIELDS[kind], kind)
    if kind == "text":
        return {}, where
    if kind == "json_object":
        return {kind: True}, where
    if not older and "format" not in form:
        message = f"{where}.format is missing; send it, or structures and triggers."
        raise RequestError(message, f"{where}.format")
    return {kind: {"type": kind, **form}}, where


def _named_schema(form: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    at = "response_format.json_schema"
    named = form.get("json_schema", {})
    if not isinstance(named, Mapping):
        raise RequestError(f"{at} must be an object that has the schema, got {named!r}.", at)
    named = _without_nulls(named)
    if "schema" not in named:
        message = f"{at}.schema is missing; send {_SCHEMA_FORM}."
        raise RequestError(message, f"{at}.schema")
    _refuse_others(form, _FIELDS["json_schema"], "json_schema")
    for name, value in named.items():
        where = f"{at}.{name}"
        if name not in _NAMED:
            fields = ", ".join(_NAMED)
            raise RequestError(f"{where} is unknown; leave it out. {at} has {fields}.", where)
        if not isinstance(value, _NAMED[name]):
            raise RequestError(f"{where} must be {_WORDS[_NAMED[name]]}, got {value!r}.", where)
    return {"json_schema": named["schema"]}, f"{at}.schema"


def _refuse_others(form: Mapping[str, Any], known: tuple[str, ...], kind: str) -> None:
    """What a response_format of this kind has no use for."""
    for name in form:
        if name in known:
            continue
        if name in ("schema", "json_schema"):
            instead = f"for a schema send {_SCHEMA_FORM}"
        elif name in NAMES:
            instead = f"send {name} as a field of the request, without response_format"
        else:
            instead = "leave it out"
        where = f"response_format.{name}"
        raise RequestError(f"{where} is no field of type {kind}; {instead}.", where)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
