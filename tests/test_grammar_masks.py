"""Masks: what a matcher allows against brute force, and rows of a step against a scripted one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import regex
from grammar_backends import pure_backend
from hypothesis import HealthCheck, example, given, settings

from jserve.grammar.backend import Backend, Matcher, Vocabulary
from jserve.grammar.masks import Constraint, Masks
from jserve.types import GrammarSpec

TOKENS = (b"a", b"b", b"c", b"ab", b"bc", b"aab", b"ba", b"", b"cc", b"abc", b"\xc3", b"\xa9")
VOCABULARY = Vocabulary(TOKENS, 40, (12, 13))  # wider than the tokens, two ends
BACKENDS: dict[str, Backend] = {}


def backend(name: str) -> Backend:
    if name not in BACKENDS:
        BACKENDS[name] = pure_backend(name, VOCABULARY)
    return BACKENDS[name]


def start(name: str, pattern: str) -> Matcher:
    one = backend(name)
    return one.load(one.compile(GrammarSpec(kind="regex", text=pattern))).fork()


def allowed(matcher: Matcher) -> set[int]:
    row = np.full(VOCABULARY.words, -1, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: VOCABULARY.size]
    return set(np.flatnonzero(bits).tolist())


def expected(pattern: str, text: bytes) -> set[int]:
    """By trying: a token is allowed iff some text that begins so matches as a whole."""
    partial = regex.compile(pattern.encode())
    found = {
        i
        for i, token in enumerate(TOKENS)
        if token and partial.fullmatch(text + token, partial=True)
    }
    return found | set(VOCABULARY.eos_ids) if partial.fullmatch(text) else found


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["a", "b", "c", "[ab]", "[b-c]", "[abc]", "ab", "ca", "b?", "(?:aa|b)"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}"])).map(
                lambda two: f"(?:{two[0]}){two[1]}"
            ),
        ),
        max_leaves=8,
    )


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(pattern=patterns(), choices=st.lists(st.integers(0, 99), max_size=8), back=st.integers(1, 8))
@example(pattern="a*", choices=[0, 0, 0], back=2)
@example(pattern="(?:ab|abc)c?", choices=[1, 0], back=1)
def test_a_token_is_allowed_iff_some_completion_matches_and_rollback_restores(
    name: str, pattern: str, choices: list[int], back: int
) -> None:
    matcher = start(name, pattern)
    texts = [b""]
    for choice in choices:
        right = expected(pattern, texts[-1])
        assert allowed(matcher) == right, f"{pattern=} after {texts[-1]!r}"
        for token in range(VOCABULARY.size):
            if token not in right:
                assert not matcher.accept(token), f"{pattern=} {texts[-1]!r} takes {token}"
                break
        going = sorted(right - set(VOCABULARY.eos_ids))
        if not going:
            break
        token = going[choice % len(going)]
        assert matcher.accept(token)
        texts.append(texts[-1] + TOKENS[token])
    back = min(back, len(texts) - 1)
    if back:
        matcher.rollback(back)
    assert allowed(matcher) == expected(pattern, texts[len(texts) - 1 - back])


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_the_end_is_allowed_where_the_text_is_whole_and_can_be_taken_back(name: str) -> None:
    matcher = start(name, "ab?")
    assert allowed(matcher) == {0, 3} and not matcher.finished
    assert not matcher.accept(12)
    assert matcher.accept(0)
    assert allowed(matcher) == {1, 12, 13} and not matcher.finished
    assert matcher.accept(13)
    assert matcher.finished
    matcher.rollback(1)
    assert allowed(matcher) == {1, 12, 13} and not matcher.finished
    assert matcher.accept(1)
    assert allowed(matcher) == {12, 13}


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_forks_go_their_own_ways(name: str) -> None:
    one = backend(name)
    template = one.load(one.compile(GrammarSpec(kind="regex", text="a[bc]c")))
    left, right = template.fork(), template.fork()
    assert left.accept(3) and right.accept(0)
    assert allowed(left) == {2} and allowed(right) == {1, 2, 4, 8}
    assert allowed(template.fork()) == {0, 3, 9}


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_letters_of_several_bytes_are_taken_byte_by_byte(name: str) -> None:
    matcher = start(name, "é+")
    assert allowed(matcher) == {10}
    assert matcher.accept(10)
    assert allowed(matcher) == {11}
    assert matcher.accept(11)
    assert allowed(matcher) == {10, 12, 13}


def test_a_limit_of_the_library_leaves_nothing_allowed_and_nothing_finished() -> None:
    matcher = start("llguidance", "((a{0,9}b?){0,999}c?){0,9999}")
    rng = np.random.default_rng(1)
    for _ in range(2000):
        going = sorted(allowed(matcher) - set(VOCABULARY.eos_ids))
        if not going:
            break
        assert matcher.accept(int(rng.choice(going)))
    assert not allowed(matcher) and not matcher.finished and not matcher.accept(0)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_what_must_come_next_is_told(name: str) -> None:
    matcher = start(name, "abc(?:a|b)")
    text = b"".join(TOKENS[token] for token in matcher.forced())
    assert b"abc".startswith(text)
    for token in matcher.forced():
        assert matcher.accept(token)
    assert re.fullmatch(b"a?b?c?", text)


# ---- the rows of a step


@dataclasses.dataclass
class ScriptedMatcher:
    """Allows the tokens of its script, one a step."""

    script: list[int]
    taken: list[int] = dataclasses.field(default_factory=list)
    accepts: int = 0

    @property
    def finished(self) -> bool:
        return len(self.taken) == len(self.script)

    def accept(self, token_id: int) -> bool:
        self.accepts += 1
        if self.finished or self.script[len(self.taken)] != token_id:
            return False
        self.taken.append(token_id)
        return True

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0
        token = self.script[len(self.taken)]
        if token >= 0:
            row[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def forced(self) -> list[int]:
        return []


@dataclasses.dataclass
class Row:
    constraint: Constraint | None = None
    output_ids: Sequence[int] = ()


@dataclasses.dataclass
class Plan:
    rows: list[Row]
    samples: np.ndarray


def ask(rows: list[Row], samples: list[bool] | None = None) -> tuple[Any, list[tuple[Row, str]]]:
    rejected: list[tuple[Any, str]] = []
    masks = Masks(2, lambda row, reason: rejected.append((row, reason)))
    plan: Any = Plan(rows, np.array(samples or [True] * len(rows)))
    return masks(plan), rejected


def constrained(script: list[int], output: Sequence[int] = ()) -> Row:
    return Row(Constraint(ScriptedMatcher(script)), output)


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_rows_without_a_grammar_cost_nothing() -> None:
    assert ask([Row(), Row()]) == (None, [])


def test_free_rows_allow_everything_beside_rows_with_a_grammar() -> None:
    masks, rejected = ask([Row(), constrained([5, 40]), constrained([5, 40], [5]), Row()])
    assert masks.shape == (4, 2) and masks.dtype == np.int32
    assert (masks[[0, 3]] == -1).all()
    assert bits(masks[1]) == [5] and bits(masks[2]) == [40]
    assert not rejected


def test_only_rows_that_sample_have_a_mask_and_the_others_are_left_alone() -> None:
    middle = constrained([1, 2])
    masks, _ = ask([middle, constrained([7])], [False, True])
    assert masks.shape == (1, 2) and bits(masks[0]) == [7]
    assert ask([middle, Row()], [False, True]) == (None, [])


def test_a_row_catches_up_with_all_its_tokens_once() -> None:
    row = constrained([3, 4, 5, 6], [3, 4])
    ask([row])
    row.output_ids = [3, 4, 5]
    masks, _ = ask([row])
    assert bits(masks[0]) == [6]
    assert row.constraint is not None and row.constraint.num_accepted == 3
    assert isinstance(row.constraint.matcher, ScriptedMatcher)
    assert row.constraint.matcher.accepts == 3


def test_a_token_that_the_grammar_does_not_allow_rejects_its_row_alone() -> None:
    bad, good = constrained([3, 4], [3, 9]), constrained([3, 4], [3])
    masks, rejected = ask([bad, good])
    assert rejected == [(bad, "the grammar does not allow token 9")]
    assert (masks[0] == -1).all() and bits(masks[1]) == [4]


def test_a_row_that_no_token_can_continue_is_rejected_and_still_sampled() -> None:
    row = constrained([3, -1], [3])
    masks, rejected = ask([row])
    assert rejected == [(row, "no token satisfies the grammar here")]
    assert (masks[0] == -1).all()


def test_a_finished_row_is_left_to_whoever_ends_it() -> None:
    masks, rejected = ask([constrained([3], [3])])
    assert (masks[0] == -1).all() and not rejected
