"""Texts of callers that JSON and GBNF allow and no answer could follow: code points that are no
characters, numbers that no double is near, schemas too deep for a stack. Each is refused by its
place, and nothing of a library's own words is shown.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_backends import pure_backend
from grammar_fake_work import VOCABULARY, scripted_work
from grammar_suites import BYTES, accepts

from jserve.grammar import worker
from jserve.grammar.backend import Backend, GrammarError, Template
from jserve.grammar.blame import blamed
from jserve.grammar.compiler import CompilerLimits, GrammarCompiler
from jserve.grammar.endings import ended
from jserve.grammar.schema_depth import MOST_DEEP
from jserve.types import GrammarSpec

NAMES = ["llguidance", "xgrammar"]


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    return {name: pure_backend(name, BYTES) for name in NAMES}


def load(backend: Backend, kind: str, text: str) -> Template:
    return backend.load(backend.compile(GrammarSpec(kind=kind, text=text)))


def why(backend: Backend, kind: str, text: str) -> str:
    with pytest.raises(GrammarError) as caught:
        backend.compile(GrammarSpec(kind=kind, text=text))
    return str(caught.value)


def tag(format: str) -> str:
    return f'{{"type":"structural_tag","format":{format}}}'


def old_tag(schema: str) -> str:
    return f'{{"structures":[{{"begin":"<a>","schema":{schema},"end":"<b>"}}],"triggers":["<"]}}'


def takes(template: Template, data: bytes) -> bool:
    matcher = template.fork()
    return all(matcher.accept(byte) for byte in data)


# ---- code points that are no characters


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "place"),
    [
        (r'root ::= "\ud800"', "the code point d800 in line 1, column 11"),
        (r"root ::= [\ud800-\udfff]{3}", "the code point d800 in line 1, column 11"),
        ('root ::= "a"\n  | "b\\U00110000"', "the code point 110000 in line 2, column 7"),
        (r"root ::= [a\U00010000-\U00110000]", "the code point 110000 in line 1, column 23"),
        ('root ::= "\ud800"', "the code point d800 in line 1, column 11"),
        (r'root ::= "\x4"', r"the escape \x in line 1, column 11"),
        ('root ::= "a"{%s}' % ("9" * 5000), "a count of 99999999999999999999, which has more tha"),
    ],
)
def test_what_is_no_character_is_refused_in_ebnf_with_its_place(
    backends: dict[str, Backend], name: str, text: str, place: str
) -> None:
    assert why(backends[name], "ebnf", text).startswith(f"the grammar has {place}")


def test_what_only_xgrammar_reads_is_looked_at_too(backends: dict[str, Backend]) -> None:
    text = 'root ::= TagDispatch(("a", b))\nb ::= "\\ud800"'
    told = why(backends["xgrammar"], "ebnf", text)
    assert told == "the grammar has the code point d800 in line 2, column 8"
    told = why(backends["xgrammar"], "ebnf", 'root ::= [^a] "\\xe9" nowhere')
    assert told.startswith("EBNF parser error at line 1, column 22")  # where it was written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (r"root ::= [\ud7f0-\ue010]", "\ud7f0\ud7ff\ue000\ue010", "\ud7ef\ue011"),
        (r"root ::= [^\ud7f0-\ue010]", "a\ud7ef\ue011\U0010ffff", "\ud7f0\ud7ff\ue000\ue010"),
        (r"root ::= [^a\n]", "bé\ud7ff\ue000\U0010ffff", "a\n"),
        (r"root ::= [^\x00-\x1f\]\\]", "[ x", "\x00\x1f]\\"),
        (r"root ::= [\x41B]", "AB", "\u041b"),
        (r"root ::= [\\x41]", "\\x41", "A"),
    ],
)
def test_sets_hold_characters_and_no_surrogates(
    backends: dict[str, Backend], name: str, text: str, right: str, wrong: str
) -> None:
    template = load(backends[name], "ebnf", text)
    assert "".join(one for one in right + wrong if takes(template, one.encode())) == right
    for code in (0xD800, 0xDBFF, 0xDFFF):
        assert not takes(template, chr(code).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", NAMES)
def test_two_digits_are_a_byte_s_escape_whatever_follows(
    backends: dict[str, Backend], name: str
) -> None:
    template = load(backends[name], "ebnf", r'root ::= "\x41B\\x41"')
    assert accepts(template, r"AB\x41") and not takes(template, "\u041b".encode())


def test_a_grammar_in_a_structural_tag_is_held_to_the_same(backends: dict[str, Backend]) -> None:
    def written(grammar: str) -> str:
        return tag(json.dumps({"type": "grammar", "grammar": grammar}))

    backend = backends["xgrammar"]
    told = why(backend, "structural_tag", written(r'root ::= "\ud800"'))
    assert told == "#/format/grammar: the grammar has the code point d800 in line 1, column 11"
    template = load(backend, "structural_tag", written(r"root ::= [\ud7f0-\ue010]"))
    assert takes(template, "\ue000".encode()) and not takes(template, b"\xed\xa0\x80")


# ---- the same in JSON


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (r'{"const":"\ud800"}', "#/const: it"),
        (r'{"type":"object","properties":{"\ud800":{}}}', "#/properties: its names"),
        (r'{"type":"string","pattern":"^\uDFFF$"}', "#/pattern: it"),
        (r'{"enum":[1,{"a/b":["\udc00"]}]}', "#/enum/1/a~1b/0: it"),
        (r'{"title":"\ud800"}', "#/title: it"),
        (r'{"\ud800":1}', "#: its names"),
    ],
)
def test_a_lone_surrogate_escaped_in_a_schema_is_refused_by_its_place(
    backends: dict[str, Backend], schema: str, place: str
) -> None:
    rule = f"{place} must not hold lone surrogates, which are no characters"
    assert why(backends["llguidance"], "json", schema) == rule
    for backend in backends.values():
        assert why(backend, "structural_tag", old_tag(schema)) == rule.replace(
            "#", "#/structures/0/schema"
        )


def test_a_lone_surrogate_elsewhere_in_a_tag_is_refused_and_a_pair_is_a_character(
    backends: dict[str, Backend],
) -> None:
    backend = backends["xgrammar"]
    for kind, field in (("regex", "pattern"), ("const_string", "value")):
        told = why(backend, "structural_tag", tag(rf'{{"type":"{kind}","{field}":"\ud800"}}'))
        assert told.startswith(f"#/format/{field}: it must not hold lone surrogates")
    template = load(backends["llguidance"], "json", r'{"const":"\ud83d\ude00"}')
    assert accepts(template, '"😀"')


# ---- numbers that nothing holds

MORE = "is more than a double holds; numbers must be below 1e308"


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ("9" * 5000, f"{'9' * 20}… (5000 characters) {MORE}"),
        ("-" + "9" * 400, f"-{'9' * 19}… (401 characters) {MORE}"),
        ("1e400", f"1e400 {MORE}"),
        ("1e" + "9" * 5000, f"1e{'9' * 18}… (5002 characters) {MORE}"),
        ("-1E-400", "-1E-400 is nearer to 0 than a double can be; write 0, or more than 1e-308"),
        ("Infinity", "Infinity is no number in JSON"),
        ("NaN", "NaN is no number in JSON"),
    ],
)
def test_a_number_that_no_double_is_near_is_refused_by_its_place(
    backends: dict[str, Backend], number: str, told: str
) -> None:
    keywords = ("const", "minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxItems")
    for keyword in (*keywords, "default"):
        schema = f'{{"items":{{"{keyword}":{number}}}}}'
        assert why(backends["llguidance"], "json", schema) == f"#/items/{keyword}: {told}"
    assert why(backends["llguidance"], "json", f'{{"enum":[[{number}]]}}') == f"#/enum/0/0: {told}"
    for backend in backends.values():
        text = old_tag(f'{{"const":{number}}}')
        assert why(backend, "structural_tag", text) == f"#/structures/0/schema/const: {told}"


@pytest.mark.parametrize("number", ["0e-999", "-0.0e999", "1e-300", "1" * 15, "1.5e10"])
def test_numbers_that_a_double_is_near_are_read(backends: dict[str, Backend], number: str) -> None:
    load(backends["llguidance"], "json", f'{{"const":{number}}}')


def test_a_reference_to_an_item_of_many_digits_leads_to_nothing(
    backends: dict[str, Backend],
) -> None:
    text = json.dumps({"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]})
    assert why(backends["llguidance"], "json", text).startswith("$ref at # leads to nothing: #/al")


@pytest.mark.parametrize(
    ("format", "told"),
    [
        ('{"type":"repeat","min":1,"max":%s,"content":{"type":"any_text"}}', "max at #/format mus"),
        ('{"type":"any_text","max_tokens":%s}', "max_tokens at #/format must be an integer of at"),
        ('{"type":"json_schema","json_schema":{"type":"integer","maximum":%s}}', "maximum at #/fo"),
        ('{"type":"json_schema","json_schema":{"enum":[{"a":%s}]}}', "#/format/json_schema/enum/0"),
    ],
)
def test_a_number_that_xgrammar_does_not_hold_is_refused_by_its_place(
    backends: dict[str, Backend], format: str, told: str
) -> None:
    text = tag(format % (10**50 + 1))
    assert why(backends["xgrammar"], "structural_tag", text).startswith(told)


# ---- schemas that are too deep or too large


def chain(length: int, link: str = "{ref}") -> str:
    links = [link.replace("{ref}", f'{{"$ref":"#/$defs/d{i + 1}"}}') for i in range(length)]
    named = ",".join(f'"d{i}":{one}' for i, one in enumerate([*links, '{"type":"null"}']))
    return f'{{"$ref":"#/$defs/d0","$defs":{{{named}}}}}'


LINKS = {
    "{ref}": 1,
    '{"type":"array","prefixItems":[{ref}],"minItems":1}': 2,
    '{"type":"object","properties":{"a":{ref}},"required":["a"],"additionalProperties":false}': 2,
}


@pytest.mark.parametrize("link", LINKS)
def test_a_chain_of_references_is_taken_up_to_the_limit_and_refused_beyond_by_place(
    backends: dict[str, Backend], link: str
) -> None:
    most = (MOST_DEEP - 2) // LINKS[link]
    assert load(backends["llguidance"], "json", chain(most, link))
    for backend, at in ((backends["llguidance"], "#"), (backends["xgrammar"], "#/format")):
        json_only = at == "#"
        schema = chain(3000, link)
        if not json_only and "prefixItems" in link:
            continue
        kind = "json" if json_only else "structural_tag"
        text = schema if json_only else tag(f'{{"type":"json_schema","json_schema":{schema}}}')
        told = why(backend, kind, text)
        assert f" leads more than {MOST_DEEP} schemas deep" in told
        last = (MOST_DEEP - 1) // LINKS[link]
        assert any(f"/d{i}" in told.split(" leads ")[0] for i in (last - 1, last)), told


def test_the_deepest_chain_fits_the_smallest_stack() -> None:
    """What a worker compiles is loaded by threads, and a process whose stack is full ends."""
    script = """
        import threading
        from grammar_suites import BYTES
        from test_grammar_texts import LINKS, MOST_DEEP, chain
        from grammar_backends import pure_backend
        from jserve.types import GrammarSpec
        backend = pure_backend("llguidance", BYTES)
        def work():
            for link, levels in LINKS.items():
                text = chain((MOST_DEEP - 2) // levels, link)
                backend.load(backend.compile(GrammarSpec(kind="json", text=text)))
            print("whole")
        threading.stack_size(2 << 20)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-500:]


def test_a_worker_has_half_of_the_stack_of_who_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_: list[Any] = []
    for given, own in ((8 << 20, 4 << 20), (resource.RLIM_INFINITY, 1 << 20)):
        monkeypatch.setattr(worker.resource, "getrlimit", lambda _, given=given: (given, -1))
        monkeypatch.setattr(worker.resource, "setrlimit", lambda *given: set_.append(given))
        worker._limit_stack()
        assert set_.pop() == (resource.RLIMIT_STACK, (own, -1))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler("scripted", VOCABULARY, CompilerLimits(max_workers=1), scripted_work)
    yield made
    made.close()


def test_what_fills_the_stack_of_a_worker_is_not_told_of_memory(compiler: GrammarCompiler) -> None:
    told = {}
    for command in ("signal 11", "signal 6", "signal 9", "die"):
        future = compiler.compile(GrammarSpec(kind="regex", text=command))
        told[command] = str(future.exception(60))
    assert told["signal 11"].startswith("it leads too deep for what compiles it")
    assert "for want of memory: it may use 2048 MB" in told["signal 6"]
    assert told["signal 9"] == told["signal 6"]
    assert "for no known reason (status 3)" in told["die"]
    assert compiler.counts.crashes == 4
    assert ended(None, 1) == ended(None, 2)


ANY_OF = {"allOf": [{"anyOf": [{"multipleOf": 2 * i + 1}, {"minimum": i}]} for i in range(20)]}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (ANY_OF, "allOf at #: what allOf, anyOf and $ref combine to is too large"),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"items": ANY_OF}}},
            "allOf at #/$defs/x/items: what allOf,",
        ),
        (
            {"items": {"anyOf": [TEXT := {"type": "string"}, {"minimum": 1e300}]}},
            "minimum at #/items/anyOf/1: minimum and maximum are no range",
        ),
        ({"properties": {"a": TEXT, "b": {"multipleOf": 1e-300}}}, "multipleOf at #/properties/b"),
        (
            {"type": "object", "properties": {f"k{i}": TEXT for i in range(900)}},
            "properties at #: at one place ",
        ),
    ],
)
def test_what_a_library_refuses_without_a_place_gets_keyword_and_place(
    backends: dict[str, Backend], schema: Any, told: str
) -> None:
    assert why(backends["llguidance"], "json", json.dumps(schema)).startswith(told)


def test_such_a_place_in_a_tag_is_the_callers(backends: dict[str, Backend]) -> None:
    told = why(backends["llguidance"], "structural_tag", old_tag(json.dumps({"items": ANY_OF})))
    assert told.startswith("allOf at #/structures/0/schema/items: what allOf,")


def test_who_looks_for_a_place_asks_no_more_than_a_thousand_times() -> None:
    asked = []

    def refuses(part: Any) -> str:
        asked.append(part)
        return "no" if len(part) > 1 else ""

    parts = {f"k{i}": {} for i in range(5000)}
    assert blamed({"properties": parts, "title": "a"}, "#", "no", refuses) == "#"
    assert 900 < len(asked) < 1100
    assert blamed({"title": "a"}, "#", "no", refuses) == ""
