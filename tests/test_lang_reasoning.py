"""Reasoning told from the answer, by the format of the model."""

from __future__ import annotations

import pytest

from jserve.errors import RequestError
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
