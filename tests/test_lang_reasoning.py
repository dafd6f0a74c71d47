"""Reasoning told from the answer, by the format of the model, and as variables of a program."""

from __future__ import annotations

import asyncio

import pytest

import jserve.lang as sgl
from jserve.errors import RequestError
from jserve.lang.backends.base import Generation, Usage
from jserve.parsers.reasoning import split_reasoning

R1, QWEN = "deepseek-r1", "qwen3"


@pytest.mark.parametrize(
    ("text", "model_type", "parts"),
    [
        ("<think>\nwhy\n</think>\n\n42", R1, ("why", "42")),
        ("why\n</think>\n42", R1, ("why", "42")),  # the template has opened it
        ("why, and no end", R1, ("why, and no end", "")),
        ("<think>a</think>b", QWEN, ("a", "b")),
        ("  <think>a</think> b ", "Qwen3", ("a", "b")),
        ("42 </think> 43", QWEN, ("", "42 </think> 43")),  # it has not thought
        ("<think>\n\n</think>\n\n42", QWEN, ("", "42")),
        ("<think>a", QWEN, ("a", "")),
        ("why</think>42", "qwen3-thinking", ("why", "42")),
        ("plain", "deepseek-v3", ("", "plain")),
        ("", QWEN, ("", "")),
    ],
)
def test_a_text_is_split_as_its_model_writes(text, model_type, parts):
    assert split_reasoning(text, model_type) == parts


def test_an_unknown_format_is_refused_with_those_that_are_there():
    with pytest.raises(RequestError, match="one of deepseek-r1, deepseek-v3, qwen3"):
        split_reasoning("x", "gpt")


# In a program.


@sgl.function
def riddle(s, model_type):
    s += "q" + sgl.separate_reasoning(sgl.gen("a", return_logprob=True), model_type)
    s += "|" + sgl.gen("b")


class Pieced(sgl.TestBackend):
    """Answers of "a" come in pieces of `length`, each character with its log-probability, and
    stand still at character `until`."""

    length, until = 1, 1_000

    async def generate_stream(self, prompt, sampling):
        whole = await self.generate(prompt, sampling)
        for at in range(0, len(whole.text), self.length):
            while at >= self.until:
                await asyncio.sleep(0.002)
            text = whole.text[at : at + self.length]
            scored = [[-1.0, ord(one), None] for one in text]
            yield Generation(text, {**whole.meta, "output_token_logprobs": scored}, Usage())


@pytest.fixture
def make():
    made = []

    def backend(text, length=1):
        made.append(Pieced({"a": text, "b": "B"}))
        made[-1].length = length
        return made[-1]

    yield backend
    for one in made:
        one.shutdown()


@pytest.mark.parametrize("length", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "model_type"),
    [
        ("<think>\nwhy so\n</think>\n\n42 is it", QWEN),
        ("why\n</think>\n42", R1),
        ("why, and no end </thi", R1),
        ("42 </think> 43", QWEN),
        ("<think>a", QWEN),
        ("<th", QWEN),
    ],
)
@pytest.mark.parametrize("name", ["a", "a_reasoning_content"])
def test_a_program_means_the_same_streamed_or_not(make, text, model_type, length, name):
    whole = riddle.run(model_type, backend=make(text))
    state = riddle.run(model_type, backend=make(text, length), stream=True)
    deltas = list(state.stream_executor.board.deltas(name))
    reasoning, answer = split_reasoning(text, model_type)
    assert (whole["a_reasoning_content"], whole["a"]) == (reasoning, answer)
    for var in ("a", "a_reasoning_content", "b"):
        assert state[var] == whole[var]
    assert state.text() == whole.text() == f"q{text}|B"
    assert "".join(delta for delta, _ in deltas) == state[name]
    scored = [entry for _, meta in deltas for entry in meta.get("output_token_logprobs", [])]
    assert "".join(chr(one[1]) for one in scored) == text  # of both variables: all


def test_thoughts_come_before_the_answer_and_are_no_empty_pieces_of_it(make):
    backend = make("<think>because</think>yes, it is")
    backend.until = len("<think>beca")
    state = riddle.run(QWEN, backend=backend, stream=True)
    thoughts, answer = state.text_iter("a_reasoning_content"), state.text_iter("a")
    said = ""
    while said != "beca":
        said += next(thoughts)
    backend.until = len("<think>because</think>yes")
    first = next(answer)
    assert first and "yes".startswith(first)
    backend.until = 1_000
    assert "".join([said, *thoughts]) == "because" and "".join([first, *answer]) == "yes, it is"


def test_what_cannot_be_separated_is_an_error_where_it_is_written():
    for wrong in ("gpt", 5):
        with pytest.raises(sgl.ExpressionError, match="separate_reasoning: model_type must be one"):
            sgl.separate_reasoning(sgl.gen("a"), wrong)
    with pytest.raises(sgl.ExpressionError, match="separated already"):
        sgl.separate_reasoning("x" + sgl.separate_reasoning(sgl.gen("a"), QWEN), QWEN)
