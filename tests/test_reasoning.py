"""Reasoning told from answers: whole texts against a plain partition, streams against whole texts,
and when a model thinks."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jserve.config.options import ServerOptions
from jserve.parsers.reasoning import FORMATS, Splitter, split, split_reasoning

TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "a", "b c", " ", "\n\n", "", "é"]),
    max_size=12,
).map("".join)


def by_partition(text: str, at_once: bool, verbatim: bool) -> tuple[str, str]:
    """What a whole text comes to."""
    stripped = text.lstrip()
    if not stripped.startswith("<think>") and not at_once:
        return "", text
    reasoning, _, answer = stripped.removeprefix("<think>").partition("</think>")
    return reasoning.strip(), answer if verbatim else answer.strip()


def streamed(text: str, cuts: list[int], splitter: Splitter) -> list[tuple[str, str]]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[i:j] for i, j in itertools.pairwise(places)]
    return [*(splitter.push(chunk) for chunk in chunks), splitter.finish()]


@settings(max_examples=400, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 60), max_size=20),
    at_once=st.booleans(),
    verbatim=st.booleans(),
    in_one_piece=st.booleans(),
)
@example(text="<think>a</think>b", cuts=[], at_once=False, verbatim=False, in_one_piece=False)
@example(text=" <th", cuts=[2], at_once=False, verbatim=False, in_one_piece=True)
@example(text="a </thi b </think> ", cuts=[4], at_once=True, verbatim=True, in_one_piece=True)
def test_a_stream_says_what_the_whole_text_says_and_thoughts_come_first(
    text: str, cuts: list[int], at_once: bool, verbatim: bool, in_one_piece: bool
) -> None:
    right = by_partition(text, at_once, verbatim)
    assert split(text, Splitter(at_once, verbatim, in_one_piece)) == right
    pieces = streamed(text, cuts, Splitter(at_once, verbatim, in_one_piece))
    assert tuple(map("".join, zip(*pieces, strict=True))) == right
    thoughts = [i for i, (reasoning, _) in enumerate(pieces) if reasoning]
    answers = [i for i, (_, answer) in enumerate(pieces) if answer]
    assert not thoughts or not answers or thoughts[-1] <= answers[0]
    assert not in_one_piece or len(thoughts) <= 1


def test_thoughts_and_answers_stream_as_soon_as_they_are_certain() -> None:
    splitter = Splitter(thinks_at_once=False)
    said = [splitter.push(text) for text in ("<th", "ink>\nI", " see", " <b", " </", "think>", "4")]
    assert said == [
        *(("", ""), ("I", ""), (" see", ""), (" <b", ""), ("", ""), ("", ""), ("", "4"))
    ]
    assert splitter.finish() == ("", "")


def test_reasoning_that_does_not_end_is_all_there_is() -> None:
    assert split_reasoning("<think>on and on </thi", "qwen3") == ("on and on </thi", "")
    assert split_reasoning("on and on", "DeepSeek-R1") == ("on and on", "")
    assert split_reasoning("on and on", "qwen3") == ("", "on and on")


@pytest.mark.parametrize(
    ("name", "variables", "thinks"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": True}, True),
        ("qwen3", {"enable_thinking": False, "thinking": True}, False),
        ("qwen3", {"enable_thinking": "false"}, True),  # as its template takes it
        ("deepseek-v3", {}, False),
        ("deepseek-v3", {"thinking": True}, True),
        ("deepseek-v3", {"thinking": False, "enable_thinking": True}, False),
        ("deepseek-r1", {"enable_thinking": False, "thinking": False}, True),
        ("qwen3-thinking", {"enable_thinking": False}, True),
    ],
)
def test_a_switch_of_the_chat_template_turns_thinking_on_or_off(
    name: str, variables: dict[str, object], thinks: bool
) -> None:
    assert FORMATS[name].thinks(variables) is thinks


def test_a_prompt_may_have_begun_or_ended_the_thinking() -> None:
    begun = FORMATS["qwen3"].begun
    assert begun(b"<|im_start|>assistant\n<think>\n") is True
    assert begun(b"assistant\n<think>\n\n</think>\n\n") is False
    assert begun(b"what is <think>?\nassistant\n") is None and begun(b"\xff") is None


def test_the_flag_takes_the_formats_that_are_there() -> None:
    (option,) = (one for one in dataclasses.fields(ServerOptions) if one.name == "reasoning_parser")
    assert option.metadata["choices"] == list(FORMATS)
