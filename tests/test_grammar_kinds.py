"""Regular expressions, EBNF, structural tags, choices: one meaning under both backends."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from grammar_backends import pure_backend
from grammar_suites import BYTES, accepts

from jserve.grammar.backend import Backend, GrammarError, Template
from jserve.grammar.choice import choose_backend, make_backend
from jserve.grammar.regex_syntax import search_match, whole_match
from jserve.grammar.spec import JSON_OBJECT, choice_spec, spec_of
from jserve.types import GrammarSpec

NAMES = ["llguidance", "xgrammar"]
BACKENDS: dict[str, Backend] = {}


def backend(name: str) -> Backend:
    if name not in BACKENDS:
        BACKENDS[name] = pure_backend(name, BYTES)
    return BACKENDS[name]


def load(name: str, kind: str, text: str) -> Template:
    return backend(name).load(backend(name).compile(GrammarSpec(kind=kind, text=text)))


def taken(template: Template, texts: list[str]) -> list[str]:
    return [text for text in texts if accepts(template, text)]


# ---- regular expressions

REGEXES = [
    ("^abc$", ["abc"], ["xabc", "abcx", ""]),
    ("^a|b$", ["a", "b"], ["ab", "ax"]),
    ("(^a|b)c", ["ac", "bc"], ["c"]),
    ("", [""], ["a"]),
    ("a|", ["a", ""], ["b"]),
    (r"[\^~]x", ["^x", "~x"], ["ax", "x"]),
    (r"[^\]\-a]+", ["b\n", "é😀"], ["a", "]", "-"]),
    (r"\d+\.\w", ["1.a", "12._"], ["٣.a", "1.é"]),
    (r"a.c", ["abc", "aéc"], ["a\nc", "ac"]),
    (r"(?s)a.c", ["abc", "a\nc"], ["ac"]),
    (r"(?i)ab[c-d]", ["AbC", "abd"], ["abe"]),
    (r"\u00e9{2}\x41", ["ééA"], ["éA"]),
    (r"(?P<y>\d{4})-(?<m>0[1-9])", ["2020-01"], ["2020-00"]),
    (r"a{,x}|x{2,3}?y{", ["xxy{", "a{,x}"], ["xxxxy{"]),
    (r"\/\"\'\-\#", ["/\"'-#"], []),
    (r"\p{Lu}\P{L}", ["A1", "É-"], ["a1", "AA"]),
    (r"\ca|[\b]", ["\x01", "\x08"], ["a"]),
    (r"\ud83d\ude00", ["😀"], []),
    (r"[\w-_]", ["a", "-", "_"], ["+"]),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pattern", "right", "wrong"), REGEXES)
def test_a_regular_expression_matches_the_whole_text(
    name: str, pattern: str, right: list[str], wrong: list[str]
) -> None:
    if pattern == r"a{,x}|x{2,3}?y{":
        with pytest.raises(GrammarError, match="dialects read differently"):
            load(name, "regex", pattern)
        return
    assert taken(load(name, "regex", pattern), right + wrong) == right


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "lookahead at position 1"),
        ("(?!a)b", "lookahead at position 0"),
        ("(?<=a)b", "lookbehind at position 0"),
        ("(?<!a)b", "lookbehind at position 0"),
        (r"(a)\1", "a backreference at position 3"),
        (r"(?P<x>a)(?P=x)", "a backreference at position 8"),
        (r"\bword\b", "a word boundary at position 0"),
        ("(?>a)b", "an atomic group at position 0"),
        ("a++", "a possessive quantifier at position 2"),
        ("(?(1)a|b)", "a condition at position 0"),
        ("a^b", "^ at position 1 stands within"),
        ("(a$)b", "$ at position 2 stands within"),
        ("(^)*a", "a repeated anchor at position 0"),
        ("(?m)^a", "the flags (?m)"),
        ("(a", "a ( without its ) at position 0"),
        ("a)", "a ) without its ( at position 1"),
        ("[a", "a [ without its ] at position 0"),
        ("a[", "a [ without its ] at position 1"),
        ("[z-a]", "a range that goes backwards at position 2"),
        ("a{3,1}", "a count from 3 to 1"),
        ("*a", "nothing to repeat at position 0"),
        ("a**", "nothing to repeat at position 2"),
        ("[[:alpha:]]", "a POSIX class at position 1"),
        ("[]a]", "dialects read differently"),
        (r"\q", r"the escape \q at position 0"),
        (r"\p{Klingon}", "the property"),
        ("(?i)É", "beyond ASCII"),
        ("a\\", "a \\ at the end"),
        ("a{9999999}", "a count of 9999999"),
        ("(" * 200 + ")" * 200, "more than 100 groups"),
        (r"[^\s\S]", "a set of nothing"),
        (r"^\x{41}$", r"\x{…}, which dialects read differently (write \u{…}), at position 1"),
    ],
)
def test_what_is_no_regular_language_or_no_common_one_is_refused_with_its_position(
    pattern: str, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        whole_match(pattern)
    assert message in str(caught.value)
    assert str(caught.value).count(" at position ") <= 1


@pytest.mark.parametrize("text", ["(?i)a", "(?s).", "(?P<x>a)", r"^\x{41}$"])
def test_what_only_other_dialects_have_is_refused_in_a_pattern(text: str) -> None:
    with pytest.raises(GrammarError, match="ECMA-262|dialects read differently"):
        search_match(text)
    for name in NAMES:
        with pytest.raises(GrammarError, match="pattern"):
            load(name, "json", json.dumps({"type": "string", "pattern": text}))


@pytest.mark.parametrize("name", NAMES)
def test_random_regular_expressions_match_what_python_says(name: str) -> None:
    rng = random.Random(3)
    atoms = [
        "a",
        "b",
        "[ab]",
        "[^a]",
        ".",
        r"\d",
        r"[^\W\d]",
        r"[\^a]",
        r"[\]b-]",
        "é",
        "[^é]",
        r"\-",
    ]

    def make(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(atoms)
        if kind < 0.55:
            return make(depth - 1) + make(depth - 1)
        if kind < 0.75:
            return f"({make(depth - 1)}|{make(depth - 1)})"
        count = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?"])
        return f"(?:{make(depth - 1)}){count}"

    checked = 0
    for i in range(150):
        pattern = rng.choice(["", "^"]) + make(rng.randint(1, 4)) + rng.choice(["", "$"])
        plain = (search_match if i % 2 else whole_match)(pattern)
        template = load(name, "regex", plain)
        python = pattern.replace(".", "[^\n\r\u2028\u2029]")
        python = python[:-1] + r"\Z" if pattern.endswith("$") else python
        match = re.compile(python, re.ASCII)
        for _ in range(10):
            text = "".join(rng.choice("ab1\né^]-") for _ in range(rng.randint(0, 5)))
            right = match.search(text) if i % 2 else match.fullmatch(text)
            assert accepts(template, text) == bool(right), f"{pattern=} {text=}"
            checked += bool(right)
    assert checked > 300


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_one_of_the_texts_and_nothing_else(name: str) -> None:
    choices = ["yes", "no", "yes, but", "a.b*(c)", 'é"\n', "/\\"]
    spec = choice_spec([*choices, "no"])
    template = load(name, spec.kind, spec.text)
    wrong = ["", "ye", "axb*(c)", "nono", "yes,"]
    assert taken(template, choices + wrong) == choices
    for bad in ([], ["a", ""], [1]):
        with pytest.raises(GrammarError, match="choices must be"):
            choice_spec(bad)  # type: ignore[arg-type]


# ---- EBNF

CALCULATOR = r"""
# the form that llama.cpp and SGLang read
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= number | "(" expr ")"
number ::= [0-9]+ ("." [0-9]{1,2})?
"""
CITIES = """
root ::= "I live in " city "."
city ::= "Bern" | "São Paulo" | quoted
quoted ::= "\\"" [^"\\n]+ "\\""
"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (CALCULATOR, ["1", "1+2", "(1-(2.25+3))"], ["", "1+", "(1", "1.234", "a"]),
        (
            CITIES,
            ["I live in São Paulo.", 'I live in "X y".'],
            ["I live in Rome.", "I live in Bern"],
        ),
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["a", "aab", "ba"]),
        ('root ::= a "b"\na ::= [ab]*', ["b", "ab", "abb"], ["", "a"]),
        ('start ::= "a"\nroot ::= start a-b a_b\na-b ::= "x"\na_b ::= "y"', ["axy"], ["ayx"]),
        (r'root ::= "\u00e9" [\u00e9-\u00ff] "\x41\U0001F600"', ["éÿA😀"], ["éÿA", "eÿA😀"]),
        (r'root ::= [\]a\-^]+ [^\x00-\x1f"\\]', ["-]^é"], ["-\n", 'a"']),
        ('root ::= x\nx ::= "(" x ")" | [a-z]+ ws\nws ::= " "{0,2}', ["((ab ))"], ["(ab   )"]),
    ],
)
def test_ebnf_is_read_alike(name: str, text: str, right: list[str], wrong: list[str]) -> None:
    assert taken(load(name, "ebnf", text), right + wrong) == right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("root ::= missing", "missing, which no rule defines in line 1, column 10"),
        ('root ::= "a"\nroot ::= "b"', "the rule root a second time in line 2, column 1"),
        ('root ::= "a"\n b', "b, which no rule defines in line 2, column 2"),
        (r'root ::= "\q"', r"the escape \q in line 1, column 11"),
        (r"root ::= [\ud800]", "the code point d800"),
        ('root ::= "a"{3,1}', "a count from 3 to 1"),
        ("root ::= [z-a]", "a range that goes backwards"),
        ('root ::= ("a"', "a ( without its ) in line 1, column 10"),
        ('root ::= "a" (="b")', "lookahead"),
        ("root ::= /a+/", "'/a+/', which has no meaning there"),
        ('item ::= "x"', "there is no rule root"),
        ("", "there is no rule root"),
        ("root ::= " + "(" * 200 + ")" * 200, "more than 100 groups"),
        ("root ::= root", "no text can satisfy the rule root"),
        ('root ::= "x" | ' + " | ".join(f'"w{i}" root' for i in range(3000)), "at most 2000 may"),
    ],
)
def test_an_error_in_ebnf_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load("llguidance", "ebnf", text)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ['start: "a"', '%llguidance {}\nstart: "a"', "root: A\nA: /a/"])
def test_larks_notation_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(GrammarError, match="is in Lark's notation; ebnf takes GBNF"):
        load(name, "ebnf", text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "root ::= root",
        "root ::= missing",
        'root := "a"',
        'root ::= "a',
        "",
        'a ::= "x"',
        "root ::= (",
    ],
)
def test_ebnf_with_an_error_is_refused(name: str, text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load(name, "ebnf", text)
    assert str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" | b\nb ::= "(" c ")"\nc ::= b | "x" c', "b"),
        ('root ::= "a" ("," more)*\nmore ::= "b" more+', "more"),
    ],
)
def test_a_rule_that_no_text_ends_is_refused_by_name(name: str, text: str, rule: str) -> None:
    with pytest.raises(GrammarError, match=f"^no text can satisfy the rule {rule}: it leads back"):
        load(name, "ebnf", text)


@pytest.mark.parametrize("name", NAMES)
def test_rules_that_lead_back_and_end_are_taken(name: str) -> None:
    text = 'root ::= "a" root | b\nb ::= "(" b? ")"\nnowhere ::= "x" nowhere'
    assert taken(load(name, "ebnf", text), ["aa(())", "aa"]) == ["aa(())"]


def test_lookahead_in_ebnf_is_refused() -> None:
    with pytest.raises(GrammarError, match="lookahead .* in line 2"):
        load("xgrammar", "ebnf", 'root ::= a "b"\na ::= "(=" [(=] (="b")')


# ---- structural tags


def old_tag(schema: Any, **more: Any) -> str:
    structure = {"begin": "<function=get>", "schema": schema, "end": "</function>"}
    return json.dumps({"structures": [structure], "triggers": ["<function="], **more})


CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_structural_tags_leave_text_free_up_to_a_trigger(name: str) -> None:
    template = load(name, "structural_tag", old_tag(CLOSED))
    tag = '<function=get>{"a":1}</function>'
    right = [
        "",
        "hello <b> é\n",
        tag,
        f"say {tag} and {tag}.",
        "<func",
        '<function=get>{"a": 1}</function>',
    ]
    wrong = ["<function=set>", '<function=get>{"a":"x"}</function>', "x <function=get>{}", tag[:-1]]
    assert taken(template, right + wrong) == right


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        (json.dumps({"structures": [], "triggers": ["<"]}), "#/structures is empty"),
        (
            json.dumps({"structures": [{"begin": "a", "end": ""}], "triggers": ["<"]}),
            "none of the trig",
        ),
        (json.dumps({"structures": [{"begin": "a"}], "triggers": ["a"]}), "begin and end"),
        (json.dumps({"structures": [{"begin": "a", "end": ""}]}), "#/triggers"),
        (old_tag({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
)
def test_structural_tags_with_an_error_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load(name, "structural_tag", text)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "minItems": -1}, "minItems at #/structures/0/schema must be"),
        ({"properties": {"a": {"not": {}}}}, "at #/structures/0/schema"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "what #/structures/0/schema re"),
    ],
)
def test_a_place_in_the_old_form_is_the_callers(name: str, schema: Any, place: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load(name, "structural_tag", old_tag(schema))
    assert place in str(caught.value)


def new_tag(format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (old_tag(CLOSED, stop_after_frist=True), "stop_after_frist at # is unknown"),
        (
            json.dumps(
                {"structures": [{"begin": "<", "schemas": {}, "end": ""}], "triggers": ["<"]}
            ),
            "schemas at #/structures/0 is unknown; known are begin, end, schema",
        ),
        (json.dumps({"format": {"type": "any_text"}, "triggers": []}), "triggers at # is unknown"),
        (new_tag({"type": "any_text", "exclude": ["a"]}), "exclude at #/format is unknown"),
        (
            new_tag({"type": "sequence", "elements": [{"type": "regex", "regex": "a"}]}),
            "regex at #/format/elements/0 is unknown; known are pattern, type",
        ),
        (
            new_tag({"type": "plus", "content": {"begin": "a", "ending": "b"}}),
            "ending at #/format/content is unknown",
        ),
    ],
)
def test_a_structural_tag_drops_nothing_that_it_does_not_know(text: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load("xgrammar", "structural_tag", text)
    assert message in str(caught.value)


def test_the_new_form_takes_schemas_regexes_and_sequences() -> None:
    template = load(
        "xgrammar",
        "structural_tag",
        new_tag(
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "A"},
                    {"type": "regex", "pattern": r"^[\^x]+$"},
                    {"type": "tag", "begin": "<j>", "end": "</j>"}
                    | {"content": {"type": "json_schema", "json_schema": CLOSED}},
                ],
            }
        ),
    )
    right = ['Ax^<j>{"a":1}</j>', 'A^<j>{"a": -2}</j>']
    wrong = ['Ab<j>{"a":1}</j>', 'Ax<j>{"b":1}</j>', 'Ax<j>{"a":1,"b":2}</j>', "A"]
    assert taken(template, right + wrong) == right


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (
            {"type": "json_schema", "json_schema": {"type": "string", "minLength": 2}},
            "minLength at ",
        ),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "(?=a)"}]},
            "#/format/elements/0/pattern: the regular expression has lookahead",
        ),
        (
            {"type": "grammar", "grammar": 'root ::= "a" (="b")'},
            "#/format/grammar: lookahead (=…) in line 1",
        ),
        ({"type": "json_schema", "json_schema": CLOSED, "any_order": True}, "any_order"),
        ({"type": "json_schema", "json_schema": CLOSED, "style": "qwen_xml"}, "style"),
        ({"type": "nonsense"}, "nonsense"),
    ],
)
def test_what_the_new_form_would_not_enforce_is_refused(format: Any, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        load("xgrammar", "structural_tag", new_tag(format))
    assert message in str(caught.value)


def test_llguidance_says_who_takes_the_new_form() -> None:
    with pytest.raises(GrammarError, match="--grammar-backend xgrammar"):
        load("llguidance", "structural_tag", new_tag({"type": "any_text"}))
    with pytest.raises(GrammarError, match="#/at_least_one needs .*--grammar-backend xgrammar"):
        load("llguidance", "structural_tag", old_tag(CLOSED, at_least_one=True))


# ---- what is asked for


def test_one_spec_comes_of_what_a_request_gives() -> None:
    assert spec_of() is None and spec_of(json_schema="", regex="") is None
    assert spec_of(regex="a") == GrammarSpec(kind="regex", text="a")
    assert spec_of(json_schema="{}") == GrammarSpec(kind="json", text="{}")
    assert spec_of(json_schema="$$ANY$$") == GrammarSpec(kind="json", text="{}")
    assert spec_of(ebnf="root ::= x") == GrammarSpec(kind="ebnf", text="root ::= x")
    assert spec_of(structural_tag="{}") == GrammarSpec(kind="structural_tag", text="{}")
    with pytest.raises(GrammarError, match="at most one of"):
        spec_of(regex="a", ebnf="b")
    assert JSON_OBJECT.kind == "json"


def test_the_backend_is_the_one_named_or_the_first_installed() -> None:
    assert choose_backend("none") == "none"
    assert choose_backend("llguidance") == "llguidance"
    assert choose_backend(None) in NAMES


def test_schemas_and_regular_expressions_go_to_llguidance_under_both_names() -> None:
    both = make_backend("xgrammar", BYTES)
    schema = GrammarSpec(kind="json", text='{"type": "string", "maxLength": 2}')
    payload = both.compile(schema)
    assert payload.startswith(b"json\0%llguidance")
    assert taken(both.load(payload), ['"\\n\\n"', '"abc"']) == ['"\\n\\n"']
    payload = both.compile(GrammarSpec(kind="regex", text="a+"))
    assert payload.startswith(b"regex\0%llguidance")
    payload = both.compile(GrammarSpec(kind="ebnf", text='root ::= "a"'))
    assert payload.startswith(b"\0{")
    assert taken(both.load(payload), ["a", "b"]) == ["a"]
