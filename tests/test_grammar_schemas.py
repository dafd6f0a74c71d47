"""JSON schemas: what is enforced, and refusals of the rest by keyword and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grammar_suites as suites
import numpy as np
import pytest
from grammar_suites import BYTES, Group, accepts, is_valid, validator, walk

from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import RequestError
from jserve.grammar.backend import Backend, GrammarError, Template
from jserve.grammar.choice import make_backend
from jserve.grammar.llguidance_backend import LLGuidanceBackend
from jserve.grammar.places import too_deep, value_too_deep
from jserve.grammar.schema_check import check_schema
from jserve.grammar.spec import JSON_OBJECT
from jserve.grammar.tag_check import check_tag_schema
from jserve.types import GrammarSpec

DATA = Path(__file__).parent / "data" / "json_schema_suite.json"
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return make_backend("llguidance", BYTES)


@pytest.fixture(scope="module")
def tag_backend() -> Backend:
    from jserve.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(BYTES)


def load(backend: Backend, schema: Any) -> Template:
    return suites.load(backend, schema)


def taken(template: Template, texts: list[str]) -> list[str]:
    return [text for text in texts if accepts(template, text)]


# ---- the official suite, a part of it


def sample() -> list[Group]:
    return [
        Group(one["file"], one["description"], one["schema"], tuple(map(tuple, one["tests"])))
        for one in json.loads(DATA.read_text())["groups"]
    ]


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_a_part_of_the_official_suite_is_never_wrong(
    name: str, request: pytest.FixtureRequest
) -> None:
    fixture = {"llguidance": "backend", "xgrammar": "tag_backend"}[name]
    backend = request.getfixturevalue(fixture)
    groups = sample()
    verdicts = [suites.judge_official(backend, group, walks=2) for group in groups]
    names = [f"{group.file} {group.description}" for group in groups]
    assert not list(suites.failures(names, verdicts))
    least = {"llguidance": 55, "xgrammar": 12}[name]
    assert sum(not verdict.refused for verdict in verdicts) >= least


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_all_suites_are_never_wrong_and_more_is_accepted_than_libraries_have_right() -> None:
    import grammar_report

    page, wrong = grammar_report.measure()
    assert not wrong, "\n".join(wrong)
    rows: dict[str, list[int]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1].isdigit():
            rows.setdefault(cells[0], []).append(int(cells[2]))  # accepted: required, optional, …
            rows.setdefault(f"{cells[0]} right", []).append(int(cells[3]))
    for alone in ("llguidance alone right", "xgrammar alone right"):
        assert rows["llguidance"][0] >= rows[alone][0]


# ---- refusals


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"not": TEXT}}}}, "not at #/properties/a/items"),
        ({"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"}, "uniqueItems at #/$defs/x"),
        ({"anyOf": [TEXT, {"contains": {}}]}, "contains at #/anyOf/1"),
        ({"properties": {"a/b~": {"if": {}, "then": TEXT}}}, "if at #/properties/a~1b~0"),
        ({"patternProperties": {"^a$": {"minProperties": 2}}}, "minProperties at "),
        ({"format": "idn-email"}, 'format at # "idn-email"'),
        ({"unevaluatedItems": False, "allOf": [{}]}, "unevaluatedItems at #"),
        ({"$dynamicRef": "#a"}, "$dynamicRef at #"),
        ({"$ref": "http://elsewhere.example/x"}, "$ref at # leads out of the schema"),
        ({"$ref": "#/$defs/none"}, "$ref at # leads to nothing"),
        ({"pattern": "(?=a)b"}, "#/pattern: the regular expression has lookahead at position 0"),
        (
            {"patternProperties": {"\\bx": {}}},
            "#/patternProperties: the regular expression has a w",
        ),
        ({"type": "number", "maximum": 2**53 + 1}, "maximum at #"),
        (
            {"properties": {"a": {"type": "integer", "maximum": 10**400}}},
            "#/properties/a/maximum: 10000000000000000000… (401 characters) is more than a double",
        ),
        ({"const": -(10**400)}, "#/const: -1000000000000000000… (402 characters) is more than a"),
        ({"type": "string", "maxLength": 10**12}, "maxLength at # is above 4294967295; lower it"),
        ({"type": "array", "minItems": 2**64}, "minItems at # is above 9223372036854775807; low"),
        (nested(150), "nested too deeply: 151 levels at #/items/items/"),
        ({"properties": {"a": 3}}, "#/properties/a is no schema"),
        ({"items": [1]}, "#/items/0 is no schema"),
        (False, "# is false, which allows nothing"),
        (None, "# must be an object, got null"),
        ([], "# must be an object, got []"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "no value can satisfy it: minLength"),
        ({"const": "\0", "properties": {"a": TEXT}}, "control characters"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
        ({"type": "strin"}, "type at # must be one of string, number, integer"),
        ({"properties": {"a": {"minLength": -1}}}, "minLength at #/properties/a must be an integ"),
        ({"maxItems": 1.5}, "maxItems at # must be an integer of at least 0, got 1.5"),
        ({"required": "a"}, 'required at # must be a list of strings, got "a"'),
        ({"enum": []}, "enum at # must be a list with at least one value"),
        ({"multipleOf": 0}, "multipleOf at # must be a number above 0"),
        ({"anyOf": {}}, "anyOf at # must be a list"),
        ({"$ref": 5}, "$ref at # must be a string"),
        ({"$ref": "#"}, "no text can satisfy it"),
        ({"minimum": 1e300, "type": "number"}, "no range that can be enforced"),
        ({"$schema": "http://x/y"}, "it refers to http://x/y, and nothing is fetched"),
        (
            {"type": "object", "properties": {f"p{i}": TEXT for i in range(700)}},
            "at most 2000 may: an object may declare about 500 optional properties",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(
    backend: Backend, schema: Any, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        load(backend, schema)
    assert message in str(caught.value)


def test_what_no_instance_can_meet_is_not_refused(backend: Backend) -> None:
    load(backend, {"type": "integer", "$defs": {"unused": {"not": {}, "uniqueItems": True}}})


RANGE = {"type": "integer", "minimum": 5, "maximum": 3}
RANGE_WHY = "minimum (5) is greater than maximum (3)"


def required(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (RANGE, f"{RANGE_WHY} at #"),
        (required("a", required("b/~", RANGE)), f"{RANGE_WHY} at #/properties/a/properties/b~1~0"),
        (
            required("a", required("b", RANGE))
            | {"properties": {"c": required("b", RANGE), "a": required("b", RANGE)}},
            f"{RANGE_WHY} at #/properties/a/properties/b",  # c need not be there
        ),
        (
            {**required("a", {"$ref": "#/$defs/x"}), "$defs": {"x": required("b", RANGE)}},
            f"{RANGE_WHY} at #/$defs/x/properties/b",
        ),
        ({"type": "array", "items": RANGE, "minItems": 1}, f"{RANGE_WHY} at #/items"),
        (
            {"type": "array", "prefixItems": [INTEGER, RANGE], "minItems": 2},
            f"{RANGE_WHY} at #/prefixItems/1",
        ),
        (
            {"type": "object", "additionalProperties": RANGE, "required": ["z"]},
            f"{RANGE_WHY} at #/additionalProperties",
        ),
        (required("a", {"allOf": [TEXT, INTEGER]}), "incompatible types at #/properties/a"),
        (required("a", False), "false allows nothing at #/properties/a"),
        (
            required("a", {**TEXT, "pattern": "^a$", "maxLength": 0}),
            "its pattern, format and lengths exclude each other at #/properties/a",
        ),
        (
            {"type": "object", "required": ["z"], "additionalProperties": False},
            "required property 'z' is unsatisfiable at #",
        ),
    ],
)
def test_a_contradiction_is_named_with_its_place(backend: Backend, schema: Any, why: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load(backend, schema)
    assert str(caught.value) == f"no value can satisfy it: {why}"


def test_a_contradiction_in_a_structural_tag_is_named_with_its_place() -> None:
    one = {"begin": "<f>", "schema": required("a", RANGE), "end": "</f>"}
    fine = {"begin": "<g>", "schema": INTEGER, "end": "</g>"}
    tag = json.dumps({"structures": [fine, one], "triggers": ["<"]})
    with pytest.raises(GrammarError) as caught:
        LLGuidanceBackend(BYTES).compile(GrammarSpec(kind="structural_tag", text=tag))
    place = "#/structures/1/schema/properties/a"
    assert str(caught.value) == f"no value can satisfy it: {RANGE_WHY} at {place}"


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
LIST = {"type": "array", "items": {"$ref": "#"}}
ONE_OF = [{"type": "null"}, {"$ref": "#"}]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"$ref": "#/$defs/x", "$defs": {"x": ENDLESS}}, "#"),
        ({"anyOf": [INTEGER, {"$ref": "#/$defs/x"}], "$defs": {"x": ENDLESS}}, "#/anyOf/1"),
        (
            {"type": "object", "properties": {"b": ENDLESS}, "$defs": {"x": ENDLESS}},
            "#/properties/b",
        ),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["b"]}, "#"),
        ({**LIST, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2}, "#"),
        ({"allOf": [{"type": "array"}, {"$ref": "#"}]}, "#"),
        ({"oneOf": [ENDLESS, {**LIST, "minItems": 1}], "$defs": {"x": {"$ref": "#"}}}, "#"),
    ],
)
def test_what_only_endless_values_meet_is_refused_with_its_place(
    backend: Backend, schema: Any, place: str
) -> None:
    why = f"no text can satisfy it: what {place} requires leads back to itself without an end"
    with pytest.raises(GrammarError) as caught:
        load(backend, schema)
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (LIST, "[[],[[]]]"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a":{"a":{}}}'),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, "[[null]]"),
        ({"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 1}, "[1,[2]]"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a":1}'),
        (
            {"type": "object", "properties": {"n": {"anyOf": ONE_OF}}, "required": ["n"]},
            '{"n":{"n":null}}',
        ),
    ],
)
def test_what_leads_back_to_itself_and_can_end_is_taken(
    backend: Backend, schema: Any, text: str
) -> None:
    assert taken(load(backend, schema), [text]) == [text]


def test_schemas_in_structural_tags_must_have_an_end_too() -> None:
    for schema in ({"$ref": "#"}, {**LIST, "minItems": 1}):
        with pytest.raises(GrammarError, match="no text can satisfy it: what #/x requires leads"):
            check_tag_schema(schema, "#/x")
    assert check_tag_schema(dict(LIST), "#/x")


def test_words_that_are_no_keywords_of_any_draft_are_annotations(backend: Backend) -> None:
    load(backend, {"type": "integer", "x-order": 1, "title": "t", "default": 3, "$comment": "c"})


def test_a_schema_cannot_set_options_of_the_library(backend: Backend) -> None:
    template = load(backend, {"type": "object", "x-guidance": {"whitespace_flexible": True}})
    assert taken(template, ["{}", "{     }"]) == ["{}"]
    with pytest.raises(GrammarError, match="not at #"):
        load(backend, {"not": {"type": "string"}, "x-guidance": {"lenient": True}})


def test_text_that_is_no_json_is_refused(backend: Backend) -> None:
    for text in ('{"type": ', "[]", '"x"', '{"const": NaN}', "[" * 100_000):
        with pytest.raises(GrammarError):
            backend.compile(GrammarSpec(kind="json", text=text))


def test_a_schema_that_names_something_twice_is_refused(backend: Backend) -> None:
    text = '{"properties": {"a": {"type": "string"}, "a": {"type": "integer"}}}'
    with pytest.raises(GrammarError, match='an object names "a" twice'):
        backend.compile(GrammarSpec(kind="json", text=text))


# ---- what is accepted is enforced


def test_two_patterns_that_are_one_written_differently_both_hold(backend: Backend) -> None:
    names = {"^\\d$": {"type": "integer"}, "^[0-9]$": {"minimum": 5}}
    template = load(
        backend, {"type": "object", "patternProperties": names, "additionalProperties": False}
    )
    assert taken(template, ['{"1":7}', '{"1":"x"}', '{"1":1}', '{"a":7}']) == ['{"1":7}']


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 1.0}, ["1"], ["1.0", "2", "true"]),
        ({"enum": [[2.0], {"a": 0.0}]}, ["[2]", '{"a":0}'], ["[false]"]),
        ({"minLength": 2.0, "type": "string"}, ['"ab"'], ['"a"']),
        ({"maximum": 3, "exclusiveMaximum": True, "type": "integer"}, ["2"], ["3"]),
        (
            {"dependentRequired": {"a": ["b"]}},
            ['{"a":1,"b":2}', '{"b":1}', "{}", "3"],
            ['{"a":1}', '{"c":1,"a":1}'],
        ),
        (
            {"dependencies": {"a": {"properties": {"b": INTEGER}}, "c": ["d"]}},
            ['{"b":2,"a":1}', '{"b":"x"}', '{"c":1,"d":1}'],
            ['{"b":"x","a":1}', '{"c":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
            ['{"x":1}', '{"xy":1,"xz":2}', "{}"],
            ['{"y":1}', '{"x":"s"}'],
        ),
        (
            {"properties": {"a": INTEGER}, "type": "object", "unevaluatedProperties": False},
            ['{"a":1}', "{}"],
            ['{"b":1}'],
        ),
        ({"prefixItems": [TEXT], "unevaluatedItems": False}, ['["a"]', "[]"], ['["a",1]', "[1]"]),
        ({"if": {"const": 0}, "uniqueItems": False, "minContains": 2}, ["1", "[1,1]"], []),
        ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
        ({"type": "string", "pattern": "^\\S$"}, ['"x"'], ['"\ufeff"', '" "']),
        ({"type": "string", "pattern": "b", "format": "date"}, [], ['"2020-02-29"', '"b"']),
        ({"type": "integer", "format": "int8"}, ["-128", "127"], ["128", "-129"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        (True, ["1", "[]", "null"], ["nul"]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": INTEGER}}
            | {"$ref": "#/definitions/a", "type": "string", "not": {}},
            ["1"],
            ['"a"'],
        ),
        (
            {"$id": "http://x.example/a", "$ref": "b", "$defs": {"b": {"$id": "b", **INTEGER}}},
            ["1"],
            ['"a"'],
        ),
    ],
)
def test_equivalent_forms_have_the_instances_that_the_schema_has(
    backend: Backend, schema: Any, right: list[str], wrong: list[str]
) -> None:
    if schema == {"type": "string", "pattern": "b", "format": "date"}:
        with pytest.raises(GrammarError):  # no date has a b
            load(backend, schema)
        return
    template = load(backend, schema)
    assert taken(template, right + wrong) == right


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 2, 8, 8.0, 100, 4321])
def test_a_whole_exclusive_limit_stays_excluded_however_near_the_other_one_is(
    backend: Backend, bound: float, apart: bool
) -> None:
    for sign, low, high in ((1, "Minimum", "maximum"), (-1, "Maximum", "minimum")):
        for other in (0.0005, 0.25, 0.5, 1, 30):
            limits = [{f"exclusive{low}": sign * bound}, {high: sign * (bound + other)}]
            schema = {"allOf": limits} if apart else {**limits[0], **limits[1]}
            template = load(backend, {"type": "number", **schema})
            minus, whole = "-" * (sign < 0), int(bound)
            texts = [f"{minus}{whole}{end}" for end in ("", ".0", ".000", ".0002", ".00049")]
            assert taken(template, texts) == texts[3:], schema


def test_a_declared_property_cannot_pass_as_another_one(backend: Backend) -> None:
    texts = ['{"a":1}', '{"b":"x"}', r'{"\u0061":"x"}', '{"a":1,"a":"x"}', r'{"b":"\u0061"}']
    for schema in (
        {"type": "object", "properties": {"a": INTEGER}},
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": TEXT},
        {"type": "object", "patternProperties": {"^a": INTEGER}},
    ):
        assert taken(load(backend, schema), texts) == texts[:2]


def test_control_characters_can_be_written_where_no_property_is_at_risk(backend: Backend) -> None:
    closed = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}
    assert accepts(load(backend, closed), r'{"a":"\u0001\n"}')
    assert accepts(load(backend, {"const": "x\0y"}), r'"x\u0000y"')
    assert not accepts(load(backend, {"const": "x\0y"}), '"xy"')


def test_compact_spaced_and_indented_texts_are_taken_and_no_more_blanks(backend: Backend) -> None:
    value = {"a": [1, {"b": []}], "c": {}}
    template = load(backend, {"type": "object"})
    texts = [json.dumps(value, separators=(",", ":")), json.dumps(value)]
    texts += [json.dumps(value, indent=indent) for indent in (1, 2, 4, "\t")]
    assert taken(template, texts) == texts
    assert not taken(template, [" {}", "{} ", "{  }", "{\n\n}", "{\n" + " " * 21 + "}"])


def test_any_json_object_is_an_object(backend: Backend) -> None:
    template = backend.load(backend.compile(JSON_OBJECT))
    assert taken(template, ["{}", '{"a":[null]}', "[]", "1"]) == ["{}", '{"a":[null]}']


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            ["2000-02-29", "2024-02-29", "1999-12-31"],
            ["1900-02-29", "0000-01-01"],
        ),
        ("time", ["23:59:60Z", "01:29:60+01:30", "08:30:06.5z"], ["23:59:60+01:00", "24:00:00Z"]),
        ("date-time", ["1990-02-28T15:59:59-08:00"], ["1990-02-31T15:59:59Z", "1990-02-28"]),
        (
            "email",
            ["a.b@example.com", '"a b"@x.y', "a@[IPv6:::1]"],
            ["a@", ".a@b"],
        ),
        (
            "ipv6",
            ["::", "::1", "1::d6:192.168.0.1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
            ["1", ":::"],
        ),
        ("ipv4", ["127.0.0.1"], ["256.1.1.1", "1.1.1"]),
        ("json-pointer", ["", "/a~1b/~0"], ["a", "/~2"]),
        ("relative-json-pointer", ["0#", "1/a"], ["/a", "01#"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ],
)
def test_formats_are_assertions(
    backend: Backend, name: str, right: list[str], wrong: list[str]
) -> None:
    template = load(backend, {"type": "string", "format": name})
    quoted = [json.dumps(text) for text in right + wrong]
    assert taken(template, quoted) == quoted[: len(right)]


def test_the_schema_of_the_caller_is_read_and_not_loosened() -> None:
    checked = check_schema('{"type":"object","properties":{"a":{"type":"string","pattern":"^a$"}}}')
    assert checked.plain_keys
    assert checked.schema["properties"]["a"] == {"type": "string", "pattern": "^(?:a)$"}


# ---- random schemas, of what both backends have


class RandomSchemas:
    def __init__(self, rng: np.random.Generator, narrow: bool) -> None:
        self._rng, self._narrow = rng, narrow

    def make(self, depth: int = 3) -> Any:
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "any"]
        kinds += ["object", "array", "tuple", "anyOf"] * 2 if depth else []
        return getattr(self, f"_{self._pick(kinds)}")(depth - 1)

    def _pick(self, options: Any) -> Any:
        return options[int(self._rng.integers(len(options)))]

    def _string(self, depth: int) -> Any:
        more = (
            [{}] if self._narrow else [{}, {"maxLength": 3}, {"minLength": 2}, {"pattern": "^a.c?"}]
        )
        return {"type": "string", **self._pick(more)}

    def _integer(self, depth: int) -> Any:
        low = int(self._rng.integers(-120, 120))
        limits = {"minimum": low, "maximum": low + int(self._rng.integers(0, 150))}
        more: list[Any] = [{}, limits, {"minimum": low}, {"maximum": low}]
        more += [] if self._narrow else [{"multipleOf": 3}, {"exclusiveMinimum": low}]
        return {"type": "integer", **self._pick(more)}

    def _number(self, depth: int) -> Any:
        more: list[Any] = [{}] if self._narrow else [{}, {"minimum": -1.5, "maximum": 12.25}]
        return {"type": "number", **self._pick(more)}

    def _boolean(self, depth: int) -> Any:
        return {"type": "boolean"}

    def _null(self, depth: int) -> Any:
        return {"type": self._pick(["null", ["null", "integer"], ["string", "boolean"]])}

    def _any(self, depth: int) -> Any:
        return self._pick([{}, True, {"type": "object"}, {"type": "array"}])

    def _enum(self, depth: int) -> Any:
        return self._pick(
            [{"enum": ["a", 1, None, 2.0, {"b": [1]}]}, {"const": 'q"\n'}, {"const": False}]
        )

    def _object(self, depth: int) -> Any:
        names = [name for name in ("a", "bé", 'c"', "d/~") if self._rng.random() < 0.6]
        node: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.make(depth) for name in names},
            "required": [name for name in names if self._rng.random() < 0.5],
        }
        if self._narrow:
            node["additionalProperties"] = False
        elif self._rng.random() < 0.7:
            node["additionalProperties"] = self._pick([False, True, self.make(depth)])
        return node

    def _array(self, depth: int) -> Any:
        least = int(self._rng.integers(3))
        more: list[Any] = [{}, {"minItems": least}, {"minItems": least, "maxItems": least + 1}]
        return {"type": "array", "items": self.make(depth), **self._pick(more)}

    def _tuple(self, depth: int) -> Any:
        node = {"type": "array", "prefixItems": [self.make(depth), self.make(depth)]}
        return {**node, "items": self._pick([False, self.make(depth)]), "minItems": 2}

    def _anyOf(self, depth: int) -> Any:
        return {"anyOf": [self.make(depth), self.make(depth)]}


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_texts_of_random_schemas_are_valid_and_their_instances_accepted(
    name: str, request: pytest.FixtureRequest
) -> None:
    backend = request.getfixturevalue({"llguidance": "backend", "xgrammar": "tag_backend"}[name])
    rng = np.random.default_rng(7)
    schemas = RandomSchemas(rng, narrow=name == "xgrammar")
    num_texts = num_instances = 0
    for _ in range(60):
        schema = schemas.make()
        template, checks = load(backend, schema), validator(schema)
        for _ in range(3):
            text = walk(template, rng)
            if text is not None:
                num_texts += 1
                assert is_valid(checks, text), f"{schema} produces {text}"
        instances = suites.Instances(schema, rng)
        for _ in range(4):
            instance = instances.make()
            for value in (instance, instances.broken(instance)):
                text = suites.compact(True, value)
                valid = is_valid(checks, text)
                num_instances += valid
                if accepts(template, text):
                    assert valid, f"{schema} accepts {text}"
                elif value is instance:
                    assert not valid, f"{schema} refuses {text}"
    assert num_texts > 100 and num_instances > 80


# ---- structural tags' schemas


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "maxLength": 3}, "maxLength at #"),
        ({"properties": {"a": INTEGER}}, "properties at # without type"),
        ({"type": "object", "properties": {"a": {"pattern": "a"}}}, "pattern at #/properties/a"),
        (
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
            "additionalProperties at #",
        ),
        ({"type": "object", "required": ["x"]}, "required at #"),
        ({"type": "object", "minProperties": 1}, "minProperties at #"),
        ({"enum": ["a", 1], "type": "string"}, "enum at #"),
        ({"allOf": [INTEGER]}, "allOf at #"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "$ref at #"),
        ({"type": "array", "items": False}, None),
        ({"type": "array", "uniqueItems": True}, "uniqueItems at #"),
    ],
)
def test_schemas_in_structural_tags_are_refused_where_xgrammar_ignores_keywords(
    tag_backend: Backend, schema: Any, message: str | None
) -> None:
    if message is None:
        assert taken(load(tag_backend, schema), ["[]", "[1]"]) == ["[]"]
        return
    with pytest.raises(GrammarError) as caught:
        load(tag_backend, schema)
    assert message in str(caught.value)


DEEP = {
    "properties": {"flat": {"enum": ['{"a":[[[[', "\\"]}, "a/b": {"anyOf": [{}, [[{"": {}}]], 3]}}
}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_place_that_is_too_deep_is_the_deepest_of_the_text_and_of_the_value(
    indent: int | None,
) -> None:
    told = "nested too deeply: 8 levels at #/properties/a~1b/anyOf/1/0/0/; put inner"
    assert told in str(too_deep(json.dumps(DEEP, indent=indent)))
    assert told in str(value_too_deep(DEEP))
    assert "0 levels at #;" in str(too_deep("3")) and "0 levels at #;" in str(value_too_deep(3))
    text = "[" * 200_000  # linear in its length, and no JSON
    assert "200000 levels at #/0/0/" in str(too_deep(text))


DEPTH = 30_000  # of which Python 3.12 and newer take a few thousand, older ones hundreds


def test_a_schema_too_deep_for_python_is_refused_with_its_place(backend: Backend) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(DEPTH):
        schema = {"properties": {"a": schema}}
    levels = f"{2 * DEPTH + 1} levels at #/properties/a"
    with pytest.raises(RequestError, match=rf"^json_schema: .* {levels}.*/a;") as told:
        sampling_from_dict({"json_schema": schema})
    assert told.value.param == "json_schema"
    text = '{"properties":{"a":' * DEPTH + "{}" + "}}" * DEPTH
    for kind in ("json", "structural_tag"):
        with pytest.raises(GrammarError, match=rf"{levels}.*/properties/a;"):
            backend.compile(GrammarSpec(kind=kind, text=text))
    shared: Any = {}
    for _ in range(DEPTH):
        shared = {"a": shared, "b": shared}  # 2^DEPTH places
    with pytest.raises(RequestError, match=rf"{DEPTH + 1} levels at #/b/b"):
        sampling_from_dict({"json_schema": shared})


@pytest.mark.parametrize("value", [{"a": {1}}, {"a": b"x"}])
def test_a_schema_that_is_no_json_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match="^json_schema must be JSON: Object of type"):
        sampling_from_dict({"json_schema": value})
