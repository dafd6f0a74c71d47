"""Grammars: keywords, tags and rules beside each other, where each of them alone is right."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from grammar_backends import pure_backend
from grammar_suites import BYTES, accepts, is_valid, load, validator, walk

from jserve.grammar.backend import Backend, GrammarError, Template
from jserve.grammar.regex_parser import Parser
from jserve.grammar.regex_texts import few_texts
from jserve.types import GrammarSpec

NAMES = ["llguidance", "xgrammar"]
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    return {name: pure_backend(name, BYTES) for name in NAMES}


@pytest.fixture(scope="module")
def backend(backends: dict[str, Backend]) -> Backend:
    return backends["llguidance"]


def load_tag(backend: Backend, tag: Any) -> Template:
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(tag))
    return backend.load(backend.compile(spec))


def taken(template: Template, texts: list[str]) -> list[str]:
    return [text for text in texts if accepts(template, text)]


# ---- JSON schemas


OLD = {"$schema": "https://json-schema.org/draft/2019-09/schema"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["c"]}}},
            ['{"b":1}', '{"a":1,"b":1,"c":1}'],
            ['{"a":1,"c":1}', '{"a":1,"b":1}', '{"c":1,"a":1}', '{"b":1,"a":1}'],
        ),
        ({**OLD, "items": [TEXT], "unevaluatedItems": False}, ['["a"]', "[]"], ['["a",1]']),
        ({**OLD, "items": [TEXT], "unevaluatedItems": INTEGER}, ['["a",1]'], ['["a","b"]']),
        (
            {**OLD, "items": [TEXT], "additionalItems": TEXT, "unevaluatedItems": INTEGER},
            ['["a","b"]'],
            ['["a",1]'],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/shared/a"}
            | {"shared": {"a": INTEGER}, "type": "string"},
            ["1"],
            ['"a"'],
        ),
        (
            {"$ref": "urn:x:a", "$defs": {"v": {"const": {"$id": "urn:x:a", "type": "string"}}}}
            | {"allOf": [{"$defs": {"a": {"$id": "urn:x:a", **INTEGER}}}]},
            ["1"],
            ['"a"'],
        ),
    ],
)
def test_what_a_keyword_says_holds_beside_others(
    backend: Backend, schema: Any, right: list[str], wrong: list[str]
) -> None:
    assert taken(load(backend, schema), right + wrong) == right


@pytest.mark.parametrize(
    "between", [{"allOf": [{}]}, {"anyOf": [{}, {}]}, {"$ref": "#/$defs/a"}, {"enum": [{"x": 1}]}]
)
def test_keywords_hold_in_any_order(backend: Backend, between: Any) -> None:
    """All orders of what says which names are additional, and another schema."""
    others = {"patternProperties": {"^x": INTEGER}, "additionalProperties": TEXT}
    schema = {"properties": {"a": {}}, **others, **between}
    for order in itertools.permutations(schema):
        ordered = {keyword: schema[keyword] for keyword in order} | {"$defs": {"a": {}}}
        template, checks = load(backend, ordered), validator(ordered)
        for text in ('{"x":1}', '{"x":"s"}', '{"b":"s"}', '{"b":1}', '{"a":1,"x":2}', "{}"):
            assert accepts(template, text) == is_valid(checks, text), f"{ordered} {text}"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}, "b": TEXT}, "patternProperties": {"^(a|b)$": {"maxLength": 2}}},
        {"required": ["b", "a"], "patternProperties": {"^[ab]$": INTEGER, "^b?b$": {"minimum": 3}}},
    ],
)
def test_names_that_are_all_declared_do_not_let_one_more_be_begun(
    backend: Backend, schema: Any
) -> None:
    schema = {"type": "object", **schema, "additionalProperties": False}
    template, checks, rng = load(backend, schema), validator(schema), np.random.default_rng(3)
    texts = [walk(template, rng) for _ in range(60)]  # which fails where nothing may follow
    assert all(is_valid(checks, text) for text in texts if text is not None)
    pairs = itertools.product(['"ab"', '"abc"', "5", "1"], repeat=2)
    for text in (f'{{"a":{one},"b":{two}}}' for one, two in pairs):
        other_order = json.dumps(dict(reversed(json.loads(text).items())))
        right = accepts(template, text) or accepts(template, other_order)
        assert right == is_valid(checks, text), text


def test_names_that_a_pattern_has_and_all_of_them_are_required(backend: Backend) -> None:
    schema = {"propertyNames": {"pattern": "^(a|b)$"}, "required": ["a", "b"], "type": "object"}
    template, rng = load(backend, schema), np.random.default_rng(5)
    for _ in range(60):
        text = walk(template, rng)
        assert text is None or json.loads(text).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(?:a|bc?)$", {"a", "b", "bc"}),
        ("[a-c]{2}", None),
        ("(?:a{0,2}){2}", {"", "a", "aa", "aaa", "aaaa"}),
        ("a*", None),
        ("(?:)*x", {"x"}),
        ("x{0}", {""}),
        ("(?:x{1000}){1000}", None),
    ],
)
def test_texts_are_told_where_they_are_few(pattern: str, texts: set[str] | None) -> None:
    assert few_texts(Parser(pattern).parse(), 5) == texts


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"dependentRequired": {"a": "b"}}, "dependentRequired at # must be an object of lists"),
        ({"dependentRequired": 5}, "dependentRequired at # must be an object of lists of str"),
        ({"dependentSchemas": []}, "dependentSchemas at # must be an object of schemas, got []"),
        ({"dependencies": {"a": 1}}, "dependencies at # must be an object of schemas and of"),
        ({"dependentSchemas": {"a/": {"not": TEXT}}}, "not at #/dependentSchemas/a~1 cannot"),
        ({"unevaluatedProperties": {"not": TEXT}}, "not at #/unevaluatedProperties cannot be"),
        (
            {"propertyNames": {"pattern": "a"}, "additionalProperties": {"not": TEXT}},
            "not at #/additionalProperties cannot",
        ),
        (
            {"properties": {"a": {}}, "patternProperties": {"^a$": {"not": TEXT}}},
            "not at #/patternProperties/^a$ cannot",
        ),
        ({"unevaluatedItems": 1}, "unevaluatedItems at # must be a schema, got 1"),
        ({"propertyNames": 1}, "propertyNames at # must be a schema, got 1"),
        ({"minContains": -1}, "minContains at # must be an integer of at least 0, got -1"),
        ({"then": 1}, "then at # must be a schema"),
        ({"uniqueItems": 0}, "uniqueItems at # must be true or false, got 0"),
        (
            {"$ref": "urn:x:a"}
            | {"$defs": {"a": {"$id": "urn:x:a", **INTEGER}, "b": {"$id": "urn:x:a", **TEXT}}},
            "$ref at # could mean several schemas: urn:x:a",
        ),
        (
            {"$ref": "#a", "$defs": {"a": {"$anchor": "a", **INTEGER}, "b": {"$anchor": "a"}}},
            "$ref at # could mean several schemas: #a",
        ),
    ],
)
def test_what_says_nothing_or_two_things_is_refused_by_its_place(
    backend: Backend, schema: Any, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        load(backend, schema)
    assert message in str(caught.value)


# ---- structural tags


def old_tag(triggers: list[str], *tags: tuple[str, Any, str]) -> Any:
    structures = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in tags]
    return {"structures": structures, "triggers": triggers}


@pytest.mark.parametrize("name", NAMES)
def test_a_trigger_behind_a_value_without_an_end_begins_a_tag(
    backends: dict[str, Backend], name: str
) -> None:
    template = load_tag(backends[name], old_tag(["<"], ("<a>", INTEGER, "")))
    right = ["<a>1", "<a>1 x", "<a>1<a>2", "x<a>1y<a>2z"]
    assert taken(template, [*right, "<a>1<", "<a>1<b", "x<"]) == right


@pytest.mark.parametrize("name", NAMES)
def test_tags_of_one_trigger_are_told_apart_behind_it(
    backends: dict[str, Backend], name: str
) -> None:
    tag = old_tag(["<"], ("<<", {"type": "boolean"}, ">"), ("<", INTEGER, ""))
    right = ["<1", "<<true>", "<1<<true>", "<<true><1", "<<true>x<1<2"]
    assert taken(load_tag(backends[name], tag), [*right, "<<1", "<true", "<1<<"]) == right


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("triggers", "message"),
    [
        (["<f", "<g"], "#/triggers/1 begins none of the tags; leave it out"),
        (["<f", "<"], '#/triggers/0 holds the trigger "<", which ends before it'),
    ],
)
def test_a_trigger_that_leads_to_nothing_is_refused(
    backends: dict[str, Backend], name: str, triggers: list[str], message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        load_tag(backends[name], old_tag(triggers, ("<f>", INTEGER, "</f>")))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (
            {"type": "triggered_tags", "triggers": ["<a", "<b"]}
            | {"tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": ">"}]},
            "#/format/triggers/1 begins none of the tags",
        ),
        (
            {"type": "qwen_xml_parameter"}
            | {"json_schema": {"type": "object", "properties": {"a": {"not": {}}}}},
            "not at #/format/json_schema/properties/a",
        ),
        (
            {"type": "qwen_xml_parameter", "json_schema": {"type": "object", "required": ["a"]}},
            "required at #/format/json_schema names what properties does not declare",
        ),
        (
            {"type": "qwen_xml_parameter", "json_schema": INTEGER},
            'type at #/format/json_schema must be "object"',
        ),
        (
            {"type": "grammar", "syntax": "lark", "grammar": 'start: "::=" /a(?=b)/'},
            "syntax at #/format must be ebnf",
        ),
    ],
)
def test_what_the_new_form_does_not_hold_is_refused(
    backends: dict[str, Backend], format: Any, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        load_tag(backends["xgrammar"], {"format": format})
    assert message in str(caught.value)


def test_parameters_as_elements_are_taken(backends: dict[str, Backend]) -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": TEXT}, "required": ["a"]}
    format = {"type": "qwen_xml_parameter", "json_schema": schema}
    one, two = "<parameter=a>1</parameter>", "<parameter=b>x y</parameter>"
    template = load_tag(backends["xgrammar"], {"format": format})
    assert taken(template, [one, one + two, two, one.replace("1", "x")]) == [one, one + two]


# ---- rules


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('root ::= "a"{0} "b"', ["b"]),
        ('root ::= "a" root{0} | "b"{0,0} "c"', ["a", "c"]),
        ('root ::= "b" | "a" root (root{0} | "c")', ["b", "ab", "abc"]),
    ],
)
def test_what_comes_no_time_is_left_out(
    backends: dict[str, Backend], name: str, text: str, right: list[str]
) -> None:
    one = backends[name]
    template = one.load(one.compile(GrammarSpec(kind="ebnf", text=text)))
    assert taken(template, ["", "a", "b", "c", "ab", "abc", "ac"]) == sorted(right, key=len)


def test_rules_with_recursion_force_nothing_under_llguidance(backend: Backend) -> None:
    """Its library can look for what comes next without an end."""
    text = 'root ::= [^b-c] | [^b-c] ( root "c"+ ("a"){0})'
    matcher = backend.load(backend.compile(GrammarSpec(kind="ebnf", text=text))).fork()
    for byte in b"aaac":
        assert matcher.forced() == b"" and matcher.accept(byte)
    assert matcher.forced() == b""
    plain = backend.load(backend.compile(GrammarSpec(kind="ebnf", text='root ::= "ab" [cd]')))
    assert plain.fork().forced() == b"ab"
