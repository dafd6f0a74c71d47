"""llguidance's limits: a pattern that would reach them is refused when it is compiled, alike as
`regex` and as `pattern`, and where one is reached all the same, one answer ends and no other does.

The vocabulary is a model's: with single bytes the limits are far away.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLParserLimits

from jserve.config.options import ModelOptions
from jserve.grammar import llguidance_backend
from jserve.grammar.backend import GrammarError, Matcher, Template, Vocabulary
from jserve.grammar.llguidance_backend import LLGuidanceBackend, LLGuidanceTemplate
from jserve.grammar.llguidance_source import source_of
from jserve.grammar.regex_counts import merge_counts, num_places
from jserve.grammar.regex_parser import Parser
from jserve.grammar.regex_syntax import write
from jserve.tokenizer.loader import load_tokenizer
from jserve.types import GrammarSpec
from jserve.weights.checkpoint import open_checkpoint

NAMES = r"([\w.-]{1,64}[, ]?){1,30}"
LISTS = (NAMES, r"([^,]{1,50},?){1,20}", r"(.{1,100}){1,10}", r"(.{1,500}){1,500}")
TOO_COSTLY = r"([^,]{1,500},?){1,400}"


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    tokenizer = load_tokenizer(open_checkpoint(ModelOptions(model_path="smollm2-135m")))
    ends = tuple(tokenizer.eos_token_ids)
    tokens = tokenizer.pieces(range(tokenizer.vocab_size), skip_special_tokens=True)
    tokens = [b"" if i in ends else token for i, token in enumerate(tokens)]
    return LLGuidanceBackend(Vocabulary(tuple(tokens), tokenizer.vocab_size, ends))


def compiled(backend: LLGuidanceBackend, kind: str, text: str) -> Template:
    return backend.load(backend.compile(GrammarSpec(kind=kind, text=text)))


def unchecked(backend: LLGuidanceBackend, text: str) -> Template:
    return backend.load(source_of(GrammarSpec(kind="regex", text=text)).text.encode())


def allowed(matcher: Matcher, backend: LLGuidanceBackend) -> np.ndarray:
    row = np.zeros(backend._words, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def walk(matcher: Matcher, backend: LLGuidanceBackend, seed: int, most: int) -> Iterator[int]:
    """Tokens drawn under its masks, until one of them could be the last."""
    rng = np.random.default_rng(seed)
    for _ in range(most):
        ids = allowed(matcher, backend)
        assert len(ids)
        token = int(rng.choice(ids))
        if not backend._tokens.tokens[token]:
            return
        assert matcher.accept(token)
        yield token


def as_pattern(text: str) -> tuple[str, str]:
    return "json", json.dumps({"properties": {"a": {"type": "string", "pattern": f"^{text}$"}}})


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_bounded_items_can_be_followed_wherever_they_lead(
    backend: LLGuidanceBackend, text: str
) -> None:
    template, num_tokens = compiled(backend, "regex", text), 0
    for seed in range(7, 10):
        num_tokens += len(list(walk(template.fork(), backend, seed, 40)))
    assert num_tokens > 60
    compiled(backend, *as_pattern(text))


def test_a_costly_pattern_is_refused_alike_in_all_grammars(backend: LLGuidanceBackend) -> None:
    why = "a pattern which is too large or too complex; shorten it, or lower its counts"
    with pytest.raises(GrammarError, match=f"^it has {why}$"):
        compiled(backend, "regex", TOO_COSTLY)
    with pytest.raises(GrammarError, match=f"^it has {why}$"):
        compiled(backend, "ebnf", 'root ::= ([^,]{1,500} ","?){1,400}')
    with pytest.raises(GrammarError, match=f"^#/properties/a/pattern: it has {why}$"):
        compiled(backend, *as_pattern(TOO_COSTLY))
    named = {"type": "object", "patternProperties": {f"^{TOO_COSTLY}$": {}}}
    with pytest.raises(GrammarError, match=f"^#/patternProperties: it has {why}$"):
        compiled(backend, "json", json.dumps(named))


def test_a_pattern_of_too_many_repeated_groups_says_so(backend: LLGuidanceBackend) -> None:
    def nested(depth: int) -> str:
        return "(" * depth + "a{1,300}" + "b)?" * depth

    compiled(backend, *as_pattern(nested(80)))
    for at, (kind, text) in {
        "pattern at #/properties/a: ": as_pattern(nested(99)),
        "": ("regex", nested(99)),
    }.items():
        with pytest.raises(GrammarError, match=f"^{at}it has a pattern with too many repeated gr"):
            compiled(backend, kind, text)


def test_a_costly_pattern_that_nothing_meets_need_not_be_met(backend: LLGuidanceBackend) -> None:
    never = {"type": "string", "pattern": "^a{1,300}$", "maxLength": 0}
    template = compiled(backend, "json", json.dumps({"type": "object", "properties": {"a": never}}))
    assert all(map(template.fork().accept, backend._tokens(b"{}")))


def test_a_limit_that_an_answer_reaches_is_named_and_ends_no_other(
    backend: LLGuidanceBackend,
) -> None:
    template = unchecked(backend, TOO_COSTLY)
    beside, same = template.fork(), unchecked(backend, TOO_COSTLY).fork()
    (token,) = backend._tokens(b"a")
    assert beside.accept(token) and same.accept(token)
    right = allowed(same, backend)
    for seed in range(2):  # the second one is as the first: nothing is left of its limit
        first, taken = template.fork(), []
        with pytest.raises(GrammarError, match="cannot be followed from here: it has a pattern"):
            for token in walk(first, backend, seed, 200):
                taken.append(token)
        assert taken
        assert not first.finished
    assert np.array_equal(allowed(beside, backend), right)
    assert len(list(walk(beside, backend, 5, 3))) == 3


def test_a_token_is_taken_though_another_answer_has_spoilt_the_lexer(
    backend: LLGuidanceBackend,
) -> None:
    template = unchecked(backend, TOO_COSTLY)
    tokens = backend._tokens(b"one, two")
    beside = template.fork()
    assert beside.accept(tokens[0])
    with pytest.raises(GrammarError):
        list(walk(template.fork(), backend, 1, 200))
    assert all(map(beside.accept, tokens[1:]))  # before any mask
    (comma,) = backend._tokens(b",")
    assert beside.accept(comma) and not beside.accept(comma)  # and a wrong one is not


def test_a_lexer_that_has_seen_too_many_states_makes_way_for_a_new_one(
    backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They add up over all answers of a grammar."""
    monkeypatch.setattr(llguidance_backend, "_LIMITS", LLParserLimits(max_lexer_states=300))
    template = compiled(backend, "regex", r"(\w{1,20} ){1,50}")
    assert isinstance(template, LLGuidanceTemplate)
    roots = [template.root()]
    for seed in range(8):
        assert len(list(walk(template.fork(), backend, seed, 20))) == 20
        roots += [template.root()] if template.root() is not roots[-1] else []
    assert len(roots) > 1


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("(a{1,100}){1,10}", "a{1,1000}"),
        ("(a{0,10}){0,100}", "a{0,1000}"),
        ("(a*)+", "a*"),
        ("(a+)?", "a*"),
        ("(a{2,}){3}", "a{6,}"),
        ("(a{2,3}){0,3}", "(?:a{2,3}){0,3}"),  # 1 is none of them
        ("(a{3}){1,2}", "(?:a{3}){1,2}"),  # 4 neither
        ("(a{3,5}){2,}", "a{6,}"),
        ("(a{0}){5}", "(?:a{0}){5}"),
        ("a{1,20}a{3}a", "a{5,24}"),
        ("aab", "aab"),
        ("(ab)*(ab){2}", "(?:ab){2,}"),
        ("(a{1,999999}){1,9}", "(?:a{1,999999}){1,9}"),
    ],
)
def test_counts_that_say_what_one_says_become_one(text: str, merged: str) -> None:
    assert write(merge_counts(Parser(text).parse())) == merged


def test_merged_counts_have_the_texts_that_they_had() -> None:
    rng, num_merged = random.Random(2), 0
    for _ in range(500):
        counts = [f"{{{low},{rng.choice(['', low + rng.randint(0, 3)])}}}" for low in (0, 1, 2, 3)]
        inner = rng.choice(["a", "b", f"(?:a{rng.choice(counts)})", f"a{rng.choice(counts)}a"])
        text = f"(?:{inner}){rng.choice(counts)}{rng.choice(['', 'a', inner + '?'])}"
        tree = Parser(text).parse()
        merged = merge_counts(tree)
        num_merged += merged != tree
        before, after = re.compile(write(tree)), re.compile(write(merged))
        for letter in ("a", "b"):
            for length in range(16):
                whole = letter * length
                assert bool(before.fullmatch(whole)) == bool(after.fullmatch(whole)), (text, whole)
    assert num_merged > 100


def test_places_are_counted_as_often_as_counts_have_them() -> None:
    assert num_places(Parser(r"(ab|c{3}){1,10}d*").parse()) == 51


@pytest.mark.full
def test_random_nested_counts_are_refused_or_followed_to_the_end(
    backend: LLGuidanceBackend,
) -> None:
    rng, num_refused, num_tokens = random.Random(4), 0, 0
    sets = ["a", ".", r"\w", r"[^,]", r"[\w.-]", r"\d", "[, ]", ";?", "(foo|bar)"]

    def make(depth: int) -> str:
        if depth == 0:
            return rng.choice(sets)
        parts = "".join(make(rng.randint(0, depth - 1)) for _ in range(rng.randint(1, 3)))
        low = rng.randint(0, 2)
        return f"({parts}){{{low},{low + rng.choice([1, 5, 20, 60, 150])}}}"

    for i in range(120):
        text = make(rng.randint(2, 3))
        try:
            template = compiled(backend, *(as_pattern(text) if i % 2 else ("regex", text)))
        except GrammarError as error:
            assert "too large or too complex" in str(error) or "no token can" in str(error), text
            num_refused += 1
            continue
        for seed in range(3):
            num_tokens += len(list(walk(template.fork(), backend, 50 + seed, 100)))
    assert 0 < num_refused < 60 and num_tokens > 3000
