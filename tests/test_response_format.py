"""OpenAI's response_format: its forms, and that nothing in it is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from jserve.errors import RequestError
from jserve.server.bodies import OpenAIBody
from jserve.server.syntax import answer_syntax

SCHEMA: dict[str, Any] = {"type": "object"}
NAMED = {"name": "a", "schema": SCHEMA}
OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
NEWER = {"type": "structural_tag", "format": {"type": "any_text"}}


def asked(form: Any, **fields: Any) -> dict[str, Any]:
    return answer_syntax(OpenAIBody(response_format=form, **fields))


@pytest.mark.parametrize(
    ("form", "field", "advice"),
    [
        ({}, "type", "is missing; send one of text, json_object"),
        ({"type": None, "regex": "a"}, "type", "is missing"),
        ({"type": ["text"]}, "type", "must be one of"),
        ({"type": "json_object", "schema": SCHEMA}, "schema", 'send {"type": "json_schema"'),
        ({"type": "json_object", "json_schema": NAMED}, "json_schema", "send {"),
        ({"type": "json_object", "foo": 1}, "foo", "leave it out"),
        ({"type": "text", "regex": "a"}, "regex", "send regex as a field of the request"),
        ({"type": "text", "schema": SCHEMA}, "schema", 'send {"type": "json_schema"'),
        ({"type": "json_schema"}, "json_schema.schema", "is missing; send {"),
        ({"type": "json_schema", "schema": SCHEMA}, "json_schema.schema", "is missing; send {"),
        ({"type": "json_schema", "json_schema": "{}"}, "json_schema", "must be an object"),
        ({"type": "json_schema", "json_schema": NAMED, "strict": True}, "strict", "leave it out"),
        ({"type": "json_schema", "json_schema": NAMED, "schema": SCHEMA}, "schema", "send {"),
        ({**OLDER, "format": {"type": "any_text"}}, "format", "leave it out"),
        ({**OLDER, "json_schema": NAMED}, "json_schema", "send {"),
        ({**NEWER, "triggers": ["<f>"]}, "triggers", "leave it out"),
        ({"type": "structural_tag"}, "format", "send it, or structures and triggers"),
        ({"type": "structural_tag", "triggers": ["a"]}, "triggers", "leave it out"),
    ],
)
def test_an_unknown_or_misplaced_field_is_refused_with_what_to_send(
    form: Any, field: str, advice: str
) -> None:
    with pytest.raises(RequestError) as caught:
        asked(form)
    assert caught.value.param == f"response_format.{field}"
    assert str(caught.value).startswith(f"response_format.{field} ") and advice in str(caught.value)


@pytest.mark.parametrize(
    ("more", "field", "advice"),
    [
        ({"strict": "yes"}, "strict", "must be true or false, got 'yes'"),
        ({"strict": 1}, "strict", "must be true or false"),
        ({"name": 3}, "name", "must be a string"),
        ({"description": []}, "description", "must be a string"),
        ({"schema": "{}"}, "schema", "must be a JSON schema"),
        ({"foo": 1}, "foo", "leave it out"),
    ],
)
def test_the_fields_of_a_named_schema_are_checked(more: Any, field: str, advice: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked({"type": "json_schema", "json_schema": {**NAMED, **more}})
    assert caught.value.param == f"response_format.json_schema.{field}"
    assert advice in str(caught.value)


def test_the_forms_of_the_api_pass_and_a_null_is_no_field() -> None:
    assert asked(None) == {}
    assert asked({"type": "text", "schema": None}) == {}
    assert asked({"type": "text"}, regex="a") == {"regex": "a"}
    assert asked({"type": "json_object", "json_schema": None})["json_schema"]
    for more in ({}, {"strict": True}, {"strict": None, "description": "b"}, {"schema": True}):
        wanted = asked({"type": "json_schema", "json_schema": {**NAMED, **more}})
        assert wanted["syntax_field"] == "response_format.json_schema.schema"
    assert asked({"type": "json_schema", "json_schema": {"schema": SCHEMA}})["json_schema"]
    for tag in (OLDER, {**OLDER, "at_least_one": True}, NEWER):
        assert asked(tag)["structural_tag"]
