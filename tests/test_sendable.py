"""What cannot be sent, or not even written, is refused by name, and nothing in flight is lost."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_engine import start, text_of

import jserve.lang as sgl
from jserve.engine.engine import Engine
from jserve.engine.requests import expand
from jserve.engine.sendable import check_sendable
from jserve.errors import RequestError
from jserve.lang.errors import ExpressionError
from jserve.types import SamplingParams

HALF, LONG = "\ud800", 10**5000  # half of a pair; more digits than Python writes
untyped: Any = sgl


@pytest.fixture(scope="module", params=[True, False], ids=["inline", "process"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start(inline=request.param) as engine:
        yield engine


def refused(param: str | None, call: Callable[[], Any]) -> None:
    with pytest.raises(RequestError) as caught:
        call()
    str(caught.value).encode()
    assert param is None or caught.value.param == param, f"{caught.value}"


@pytest.mark.parametrize(
    "value", [HALF, LONG, 10**30, -(2**63) - 1], ids=["half", "long", "1e30", "least"]
)
def test_a_question_that_cannot_be_sent_is_refused(engine: Engine, value: Any) -> None:
    asked: Any = engine.control
    refused("mode", lambda: asyncio.run(asked("pause_generation", mode=value)))
    refused("x", lambda: asyncio.run(asked("server_info", x=value)))
    refused("op", lambda: asyncio.run(asked(value)))
    refused("args", lambda: asyncio.run(asked("server_info", **{HALF: 1})))
    refused("mode", lambda: engine.pause_generation(value))
    refused("timeout", lambda: engine.flush_cache(value))
    refused("rid", lambda: engine.abort(value))
    refused("abort_all", lambda: engine.abort("x", abort_all=value))
    assert engine.generate("hello", {"max_new_tokens": 4})["text"] == text_of("hello", 4)


@pytest.mark.parametrize(
    "value",
    [HALF, LONG, [HALF], [LONG], {"a": LONG}, {LONG: 1.0}, {HALF: 1.0}, {5: LONG}],
    ids=["half", "long", "halves", "longs", "held", "key", "half key", "bias"],
)
def test_every_argument_of_generate_that_cannot_be_written_is_refused_by_name(
    engine: Engine, value: Any
) -> None:
    for name in inspect.signature(expand).parameters:
        if name not in ("prompt", "sampling_params"):
            prompt = {} if name == "input_ids" else {"prompt": "a"}
            refused(
                name, lambda name=name, prompt=prompt: engine.generate(**prompt, **{name: value})
            )
    for name in (*SamplingParams.__struct_fields__, "choices", "json_object"):
        params: Any = {"max_new_tokens": 1, name: value}
        refused(name, lambda params=params: engine.generate("a", params))
    refused(None, lambda: engine.generate(value, {"max_new_tokens": 1}))
    refused(None, lambda: engine.generate("a", value))
    refused(None, lambda: engine.generate("a", **{f"nonsense{HALF}": value}))
    assert engine.generate("hello", {"max_new_tokens": 4})["text"] == text_of("hello", 4)


def test_what_has_no_end_is_refused(engine: Engine) -> None:
    endless: dict[str, Any] = {}
    endless["endless"] = endless
    refused("sampling_params", lambda: engine.generate("a", {"logit_bias": endless}))


def test_a_number_of_a_schema_may_be_longer_than_a_message_has() -> None:
    check_sendable("sampling_params", {"json_schema": {"maximum": 10**30}})


@pytest.mark.parametrize(
    "value", [LONG, [LONG], {LONG: 1.0}, {5: LONG}], ids=["long", "longs", "key", "bias"]
)
def test_programs_are_told_of_numbers_that_cannot_be_written(value: Any) -> None:
    def told(body: Callable[[Any], Any], **given: Any) -> None:
        backend = sgl.TestBackend({"x": "a"})
        try:
            with pytest.raises((ExpressionError, RequestError)):
                sgl.function(body).run(backend=backend, **given).text()
        finally:
            backend.shutdown()

    told(lambda s: s.__iadd__(value))
    told(lambda s: s.fork(value))
    told(lambda s: s.__iadd__(untyped.select("x", choices=value)))
    told(lambda s: s.__iadd__(untyped.select("x", choices=["a", value])))
    told(lambda s: s.__iadd__(untyped.separate_reasoning(sgl.gen("x"), model_type=value)))
    for name in ("stop", "regex", "json_object", "dtype", "ebnf"):
        told(lambda s, name=name: s.__iadd__(untyped.gen("x", **{name: value})))


def test_a_fork_has_no_endless_number_of_branches() -> None:
    backend = sgl.TestBackend()
    program = sgl.function(lambda s: s.fork(10**30))
    with pytest.raises(ExpressionError, match=r"fork: size must be an integer in \[1, 10000\]"):
        program.run(backend=backend).text()
    backend.shutdown()


def test_a_batch_that_is_no_list_is_refused() -> None:
    program: Any = sgl.function(lambda s: s.__iadd__("x"))
    for value in (LONG, 5, None):
        with pytest.raises(ExpressionError, match="run_batch takes a list of dicts or tuples"):
            program.run_batch(value, backend=sgl.TestBackend())
