"""Masks: what a matcher allows against brute force, and rows of a step against a scripted one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import regex
from grammar_backends import pure_backend
from hypothesis import HealthCheck, example, given, settings

from jserve.grammar.backend import Backend, Matcher, Vocabulary
from jserve.grammar.constraint import Constraint
from jserve.grammar.masks import Masks
from jserve.grammar.templates import Templates
from jserve.plan import StepPlan
from jserve.scheduler.settings import SchedulerSettings
from jserve.types import CompiledSpec, FinishReason, GrammarSpec, SamplingParams, Submit, Thinking

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


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_what_must_come_next_is_told(name: str) -> None:
    matcher = start(name, "abc(?:a|b)")
    assert matcher.forced() == b"abc"
    for token in (0, 1, 2):
        assert matcher.accept(token)
    assert matcher.forced() == b""


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

    def forced(self) -> bytes:
        return b""


@dataclasses.dataclass
class Loading:
    """What Templates gives: done, and a fork of it is the script."""

    script: list[int]

    def load(self, _: object) -> Loading:
        return self

    def result(self) -> Loading:
        return self

    def fork(self) -> ScriptedMatcher:
        return ScriptedMatcher(self.script)


@dataclasses.dataclass
class Answer:
    """A request, as Masks sees it."""

    submit: Submit
    script: list[int]
    output_ids: list[int]
    constraint: Constraint | None = None


@dataclasses.dataclass
class Row:
    request: Answer
    alive: bool = True


@dataclasses.dataclass
class Plan:
    rows: list[Row]
    samples: np.ndarray


SETTINGS = SchedulerSettings(
    num_slots=4,
    context_length=64,
    page_size=4,
    chunked_prefill_size=64,
    max_prefill_tokens=64,
    vocab_size=64,
    eos_token_ids=(63,),
)


@dataclasses.dataclass
class Scheduling:
    finish: Callable[[Any, FinishReason], None]
    count: Callable[[str, int], None]
    settings: SchedulerSettings = SETTINGS


END = 63  # the model's EOS, in rows of 64
Ended = list[tuple[Answer, FinishReason]]


def ask(rows: list[Row], samples: list[bool] | None = None) -> tuple[Any, Ended, dict[str, int]]:
    """The masks, who was ended, and what was counted."""
    ended: Ended = []
    counts: dict[str, int] = {}
    scheduler = Scheduling(
        lambda request, finish: ended.append((request, finish)),
        lambda name, n: counts.update({name: counts.get(name, 0) + n}),
    )
    masks = Masks(cast(Templates, None), scheduler)
    result = None
    for row in rows:  # each has a grammar of its own
        if row.request.constraint is None and row.request.submit.grammar is not None:
            matcher = ScriptedMatcher(row.request.script)
            row.request.constraint = Constraint(matcher, (END,), row.request.submit.thinking)
    result = masks(cast(StepPlan, Plan(rows, np.array(samples or [True] * len(rows)))))
    return result, ended, counts


def free() -> Row:
    return Row(Answer(Submit(rid="free", prompt_ids=[1], sampling=SamplingParams()), [], []))


def bound(
    script: list[int],
    output: Sequence[int] = (),
    thinking: Thinking | None = None,
    **sampling: Any,
) -> Row:
    grammar = CompiledSpec(spec=GrammarSpec(kind="regex", text=repr(script)), payload=b"")
    submit = Submit(
        rid=repr(script),
        prompt_ids=[1],
        sampling=SamplingParams(**sampling),
        grammar=grammar,
        thinking=thinking,
    )
    return Row(Answer(submit, script, list(output)))


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_rows_without_a_grammar_have_no_masks() -> None:
    assert ask([free(), free()]) == (None, [], {})


def test_free_rows_allow_everything_beside_rows_with_a_grammar() -> None:
    masks, ended, counts = ask([free(), bound([5, 40]), bound([5, 40], [5]), free()])
    assert masks.shape == (4, 2) and masks.dtype == np.int32
    assert (masks[[0, 3]] == -1).all()
    assert bits(masks[1]) == [5] and bits(masks[2]) == [40]
    assert not ended and counts == {"grammar_rows_masked_total": 2}


def test_only_rows_that_sample_have_a_mask_and_the_others_are_left_alone() -> None:
    middle = bound([1, 2])
    masks, _, _ = ask([middle, bound([7])], [False, True])
    assert masks.shape == (1, 2) and bits(masks[0]) == [7]
    assert ask([middle, free()], [False, True])[0] is None


def test_a_row_whose_stay_has_ended_is_free() -> None:
    over = bound([1, 2], [9])
    over.alive = False
    masks, ended, _ = ask([over, bound([7])])
    assert (masks[0] == -1).all() and not ended


def test_a_grammar_is_begun_with_the_first_mask_and_catches_up_with_each_token_once() -> None:
    row, loading = bound([3, 4, 5, 6], [3, 4]), Loading([3, 4, 5, 6])
    scheduler = Scheduling(lambda *_: None, lambda *_: None)
    masks = Masks(cast(Templates, loading), scheduler)
    plan = cast(StepPlan, Plan([row], np.array([True])))
    masks(plan)
    row.request.output_ids = [3, 4, 5]
    given = masks(plan)
    assert given is not None and bits(given[0]) == [6]
    constraint = row.request.constraint
    assert constraint is not None and constraint.num_seen == 3
    assert isinstance(constraint.matcher, ScriptedMatcher) and constraint.matcher.accepts == 3


def test_a_token_that_the_grammar_does_not_allow_ends_its_request_alone() -> None:
    bad, good = bound([3, 4], [3, 9]), bound([3, 4], [3])
    masks, ended, counts = ask([bad, good])
    ((request, finish),) = ended
    assert request is bad.request and finish.type == "abort" and finish.status_code is None
    assert finish.message == "The answer is incomplete: the grammar does not allow token 9."
    assert counts["grammar_failures_total/token"] == 1
    assert bits(masks[1]) == [4]


def test_a_row_that_no_token_can_continue_ends_as_incomplete() -> None:
    row = bound([3, -1], [3])
    _, ((request, finish),), counts = ask([row])
    assert request is row.request
    assert finish.message == "The answer is incomplete: no token satisfies the grammar here."
    assert counts["grammar_failures_total/nothing"] == 1


def test_a_grammar_that_is_at_its_end_allows_the_end_token_alone() -> None:
    masks, ended, _ = ask([bound([3], [3])])
    assert bits(masks[0]) == [END] and not ended


def test_an_answer_that_ignores_the_end_token_stops_behind_it() -> None:
    row = bound([3], [3, END], ignore_eos=True)
    _, ((request, finish),), _ = ask([row])
    assert request is row.request and (finish.type, finish.matched) == ("stop", END)


def test_a_token_behind_the_end_token_is_rejected() -> None:
    _, ((_, finish),), counts = ask([bound([3], [3, END, 4])])
    assert finish.type == "abort" and counts["grammar_failures_total/token"] == 1


def test_min_new_tokens_that_the_grammar_cannot_reach_ends_as_incomplete() -> None:
    masks, ended, _ = ask([bound([3, 4], [3], min_new_tokens=5)])
    assert bits(masks[0]) == [4] and not ended  # it can still go on
    _, ((_, finish),), counts = ask([bound([3], [3], min_new_tokens=5)])
    assert finish.message == (
        "The answer is incomplete: the grammar allows no more than 1 tokens, of min_new_tokens 5."
    )
    assert counts["grammar_failures_total/length"] == 1
    _, ((_, finish),), _ = ask([bound([3, 4], [3], min_new_tokens=5, stop_token_ids=(4,))])
    assert finish.type == "abort"  # a stop token is no way on either


# ---- thinking: a row is free until 7, or 7 8, was generated; 6 opens it


def free_but_for_the_end(mask: np.ndarray) -> bool:
    return bits(mask) == [i for i in range(64) if i != END]


def test_tokens_up_to_the_end_of_the_thinking_are_free_but_for_the_end_token() -> None:
    thought = Thinking(end=(7,))
    rows = [bound([3, 4], output, thought) for output in ([], [8, 9], [8, 7], [8, 7, 3])]
    masks, ended, counts = ask(rows)
    assert free_but_for_the_end(masks[0]) and free_but_for_the_end(masks[1])
    assert bits(masks[2]) == [3] and bits(masks[3]) == [4]
    assert not ended and counts == {"grammar_rows_masked_total": 4}


def test_thinking_ends_with_the_whole_run_of_its_last_tokens() -> None:
    thought = Thinking(end=(7, 8))
    outputs = ([7], [7, 9, 8], [8, 7, 7], [8, 7], [7, 7, 8])
    masks, ended, _ = ask([bound([3, 4], output, thought) for output in outputs])
    assert all(free_but_for_the_end(mask) for mask in masks[:4]) and bits(masks[4]) == [3]
    assert not ended


def test_where_thinking_must_be_opened_the_first_token_decides() -> None:
    thought = Thinking(end=(7,), begin=6)
    outputs = ([], [3], [6], [6, 9], [6, 7], [6, 9, 7, 3])
    masks, ended, _ = ask([bound([3, 4], output, thought) for output in outputs])
    assert bits(masks[0]) == [3, 6]
    assert bits(masks[1]) == [4]  # it answers at once
    assert free_but_for_the_end(masks[2]) and free_but_for_the_end(masks[3])
    assert bits(masks[4]) == [3] and bits(masks[5]) == [4]
    assert not ended


def test_thinking_cannot_be_opened_later() -> None:
    _, ((_, finish),), _ = ask([bound([3, 4], [3, 6], Thinking(end=(7,), begin=6))])
    assert finish.message == "The answer is incomplete: the grammar does not allow token 6."


def test_an_answer_that_ended_in_its_thinking_is_incomplete() -> None:
    _, ((_, finish),), counts = ask([bound([3, 4], [9, END], Thinking(end=(7,)))])
    assert finish.type == "abort" and counts["grammar_failures_total/token"] == 1


def test_least_lengths_count_thoughts_and_hold_behind_them() -> None:
    thought = Thinking(end=(7,), begin=6)
    masks, ended, _ = ask(
        [
            bound([3], [6, 9, 7, 3], thought, min_new_tokens=4),
            bound([3], [], thought, min_new_tokens=5),
        ]
    )
    assert bits(masks[0]) == [END] and bits(masks[1]) == [3, 6] and not ended
    _, ((_, finish),), counts = ask([bound([3], [3], thought, min_new_tokens=5)])
    assert finish.type == "abort" and counts["grammar_failures_total/length"] == 1


def test_nothing_is_appended_while_it_is_open_whether_an_answer_thinks() -> None:
    jumped: list[Sequence[int]] = []
    scheduler = Scheduling(lambda *_: None, lambda *_: None)
    script = Loading([3, 4])
    masks = Masks(
        cast(Templates, script), scheduler, lambda request, _: jumped.append(request.output_ids)
    )
    thought = Thinking(end=(7,), begin=6)
    rows = [bound([3, 4], output, thought) for output in ([], [6], [6, 9], [6, 7], [3])]
    masks(cast(StepPlan, Plan(rows, np.ones(len(rows), bool))))
    assert jumped == [[6, 7], [3]]
