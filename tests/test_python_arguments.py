"""What Engine.generate takes from Python beside plain values: what asks for nothing, and arrays."""

from __future__ import annotations

import array
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import continuation
from test_engine import start

from jserve.engine.engine import Engine
from jserve.engine.python_arguments import _KNOWN as ARGUMENTS
from jserve.engine.unsupported import GENERATE
from jserve.errors import RequestError

GUIDE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
SHORT = {"max_new_tokens": 3}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as engine:
        yield engine


def ids(engine: Engine, *arguments: Any, **options: Any) -> Any:
    """The output ids of the answer, or of each."""
    said = engine.generate(*arguments, **options)
    return [one["output_ids"] for one in said] if isinstance(said, list) else said["output_ids"]


def test_arguments_that_ask_for_nothing_are_taken_whatever_they_would_ask_for(
    engine: Engine,
) -> None:
    expected = continuation(list(b"abc"), 3)
    names = [*GENERATE, "external_trace_header", "return_prompt_token_ids"]
    assert len(names) > 25 and "image_data" in names
    for nothing in (None, False, [], "", {}, [None]):
        assert ids(engine, "abc", SHORT, **dict.fromkeys(names, nothing)) == expected
    assert ids(engine, "abc", SHORT, None, routed_experts_start_len=0) == expected
    given = {name: None for name in ARGUMENTS if name not in ("prompt", "sampling_params")}
    assert ids(engine, "abc", SHORT, **given) == expected
    assert ids(engine, ["abc"], SHORT, image_data=[None]) == [expected]


@pytest.mark.parametrize(
    ("arguments", "options", "param", "message"),
    [
        ((), {"image_data": "a.png"}, "image_data", "not supported"),
        ((), {"image_data": [None, "a.png"]}, "image_data", "not supported"),
        ((), {"lora_path": np.array(["a"])}, "lora_path", "not supported"),
        ((), {"return_hidden_states": True}, "return_hidden_states", "not supported"),
        ((), {"routed_experts_start_len": 4}, "routed_experts_start_len", "not supported"),
        ((), {"return_logprobs": True}, "return_logprobs", "did you mean return_logprob"),
        ((), {"nonsense": None}, "nonsense", "not an argument of generate"),
        ((), {"prompt": "b"}, "prompt", "given twice"),
        ((None, None, ["x"]), {}, None, "5 arguments without a name"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    engine: Engine, arguments: Any, options: Any, param: str | None, message: str
) -> None:
    given = ("a", SHORT, *arguments)
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate(*given, **options)
    assert caught.value.param == param
    with pytest.raises(RequestError, match=message):
        asyncio.run(engine.async_generate(*given, **options))


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([97, 98]),
        jnp.array([97, 98]),
        array.array("i", [97, 98]),
        (97, 98),
        [np.int64(97), np.int32(98)],
        [jnp.int32(97), 98],
    ],
)
def test_arrays_and_their_scalars_are_ids(engine: Engine, prompt: Any) -> None:
    assert ids(engine, input_ids=prompt, sampling_params=SHORT) == continuation([97, 98], 3)


def test_arrays_of_two_dimensions_and_lists_of_arrays_are_batches(engine: Engine) -> None:
    expected = [continuation([97, 98], 3), continuation([99, 100], 3)]
    for prompts in (
        np.array([[97, 98], [99, 100]]),
        [np.array([97, 98]), jnp.array([99, 100])],
        [[97, 98], [np.int64(99), 100]],
    ):
        assert ids(engine, None, SHORT, prompts) == expected
    assert ids(engine, np.array(["ab", "cd"]), SHORT) == expected


def test_scalars_of_arrays_are_numbers_wherever_one_may_stand(engine: Engine) -> None:
    params = {
        "max_new_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "ignore_eos": np.True_,
        "stop_token_ids": np.array([1, 2]),
        "logit_bias": {np.int64(5): np.float64(-1.0)},
    }
    options = {"priority": np.int32(2), "return_logprob": np.True_, "logprob_start_len": np.int8(0)}
    body = engine.generate("ab", params, **options)
    assert len(body["output_ids"]) == 3 and len(body["meta_info"]["output_token_logprobs"]) == 3
    assert len(list(engine.generate("ab", params, stream=np.True_))) >= 1


@pytest.mark.parametrize(
    "wrong", [np.array([0.5, 1.0]), np.array(5), np.array([True]), [np.array([[1]])]]
)
def test_arrays_of_other_kinds_are_refused_by_name(engine: Engine, wrong: Any) -> None:
    with pytest.raises(RequestError, match="input_ids"):
        engine.generate(input_ids=wrong, sampling_params=SHORT)


def test_the_guide_lists_every_argument() -> None:
    _, _, table = GUIDE.partition("## Arguments")
    table, _, _ = table.partition("\n\nThe first")
    listed = re.findall(r"^\| ([\w, ]+?) \|", table, re.MULTILINE)
    names = {name for row in listed for name in row.split(", ")} - {"argument"}
    assert names == {*ARGUMENTS} - {"data_parallel_rank"} and "data_parallel_rank" in table
