"""Every sampling parameter of the native API is gen's and run's too, or refused by a backend."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from native_server import NativeServer, running
from test_lang_engine import TEMPLATE

import jserve.lang as sgl
from jserve.engine.engine import Engine
from jserve.errors import RequestError
from jserve.lang.sampling import FIELDS, SYNTAXES, MoreArguments
from jserve.server.app import create_app
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import SamplingParams, Submit

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]
NATIVE = set(SamplingParams.__struct_fields__) - {"syntax_field"}
#: A value of each that is not its default.
GIVEN: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "frequency_penalty": 0.25,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {65: 1.5, 66: -2.0},
    "stop": ("!",),
    "stop_regex": ("x+y",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "n": 2,
    "sampling_seed": 17,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "stream_interval": 2,
}
NOT_OPENAI = ("spaces_between_special_tokens", "stream_interval")
OPENAI = {name: value for name, value in GIVEN.items() if name not in NOT_OPENAI}
untyped: Any = sgl


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    tokenizer = Tokenizer(byte_source(256, templates={"default": TEMPLATE}))
    with (
        Engine("fake", inline=True, builder="tests.fake_engine:build", tokenizer=tokenizer) as one,
        running(create_app(one, one.config)) as url,
    ):
        yield one, url


def own_names(given: dict[str, Any]) -> dict[str, Any]:
    """As gen calls them."""
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    return {names.get(name, name): value for name, value in given.items()}


def bound(**given: Any) -> sgl.SglFunction:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "a prompt" + untyped.gen("x", **own_names(given))

    return program


def test_gen_and_run_take_what_the_native_api_takes() -> None:
    assert set(FIELDS) >= NATIVE and set(GIVEN) == NATIVE - set(SYNTAXES) - {"regex"}
    taken = inspect.signature(sgl.gen).parameters.keys() | get_type_hints(MoreArguments).keys()
    assert own_names(dict.fromkeys(FIELDS)).keys() == taken - {
        *("name", "choices", "choices_method", "more")
    }


def test_gen_says_which_parameter_it_has_not() -> None:
    with pytest.raises(sgl.ExpressionError, match="no parameter max_token; did you mean max_tok"):
        untyped.gen("x", max_token=3)
    with pytest.raises(sgl.ExpressionError, match="gen has no parameter colour"):
        untyped.gen_int("x", colour=3)


def openai(url: str) -> sgl.OpenAI:
    return sgl.OpenAI("fake", is_chat_model=False, base_url=f"{url}/v1", api_key="none")


@pytest.mark.parametrize("where", ["gen", "run"])
@pytest.mark.parametrize("backend", ["engine", "endpoint", "openai"])
def test_parameters_come_to_the_engine_as_they_were_given(
    served: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch, backend: str, where: str
) -> None:
    engine, url = served
    makers = {
        "engine": lambda: sgl.EngineBackend(engine),
        "endpoint": lambda: sgl.RuntimeEndpoint(url),
        "openai": lambda: openai(url),
    }
    given = OPENAI if backend == "openai" else GIVEN
    sent: list[Submit] = []
    send = engine._client.send

    def watch(message: Any) -> None:
        if isinstance(message, Submit):
            sent.append(message)
        send(message)

    monkeypatch.setattr(engine._client, "send", watch)
    one = makers[backend]()
    program, base = (bound(**given), {}) if where == "gen" else (bound(), given)
    state = program.run(backend=one, **base)
    assert state.error() is None and len(state["x"]) == 2
    assert [submit.sampling.sampling_seed for submit in sent] == [17, 18]
    for submit in sent:
        params = {name: getattr(submit.sampling, name) for name in given}
        assert params | {"n": 2, "sampling_seed": 17} == given
    one.shutdown()


def test_an_endpoint_gets_the_native_names(served: tuple[Engine, str]) -> None:
    server = NativeServer()
    with running(server.app) as url:
        backend = sgl.RuntimeEndpoint(url)
        syntax = {"structural_tag": {"format": {"type": "any_text"}}}
        bound(logit_bias={65: 1}, sampling_seed=3, **syntax).run(backend=backend)
        bound(ebnf='root ::= "a"', skip_special_tokens=False).run(backend=backend)
        bound(json_object=True).run(backend=backend)
        backend.shutdown()
    first, second, third = (request["sampling_params"] for request in server.requests)
    assert first["logit_bias"] == {"65": 1} and first["sampling_seed"] == 3
    assert json.loads(first["structural_tag"]) == syntax["structural_tag"]
    assert second["ebnf"] == 'root ::= "a"' and third["json_object"] is True
    assert (first["skip_special_tokens"], second["skip_special_tokens"]) == (True, False)
    assert "logit_bias" not in second and "repetition_penalty" not in second


@pytest.mark.parametrize("name", NOT_OPENAI)
def test_what_openais_api_has_no_word_for_is_refused_by_name(
    served: tuple[Engine, str], name: str
) -> None:
    backend = openai(served[1])
    error = bound(**{name: GIVEN[name]}).run(backend=backend).error()
    assert isinstance(error, sgl.ProgramError)
    assert f"{name} is for engines and their servers, not OpenAI's API" in str(error)
    backend.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"ebnf": 'root ::= "a" [0-9]+'}, "a12", "b"),
        ({"json_object": True}, '{"a":1}', "[1]"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "yes"}}}, "yes", "no"),
    ],
)
def test_a_script_must_follow_every_kind_of_syntax(
    given: dict[str, Any], good: str, bad: str, stream: bool
) -> None:
    backend = sgl.TestBackend({"x": [good, bad]})
    (name,) = given
    assert bound(**given).run(backend=backend, stream=stream)["x"] == good
    error = bound(**given).run(backend=backend, stream=stream).error()
    assert f"{bad!r}, does not match its {name}" in str(error)
    step = bound(**given).trace().steps[-1]
    assert step.detail == name
    backend.shutdown()


def test_a_scripted_answer_keeps_its_stop_where_that_is_asked_for() -> None:
    backend = sgl.TestBackend({"x": "one. two"})
    assert bound(stop=".", no_stop_trim=True).run(backend=backend)["x"] == "one."
    assert bound(stop=".").run(backend=backend)["x"] == "one"
    backend.shutdown()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": [3]}, "logit_bias must be a dict from token ids to numbers, got"),
        ({"ebnf": 3}, "ebnf must be a text, got 3"),
        ({"json_object": "yes"}, "json_object must be true or false, got 'yes'"),
        ({"structural_tag": 3}, "structural_tag must be a dict or text, got 3"),
        ({"ebnf": "a", "json_schema": {}}, "give json_schema, or ebnf, not both"),
        ({"ebnf": "a", "regex": "b"}, "give ebnf, or regex or dtype, not both"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_its_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(sgl.ExpressionError, match=message):
        untyped.gen("x", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be keyed by ids"),
        ({"repetition_penalty": 3.0}, r"repetition_penalty must be in \(0, 2\], got 3.0"),
        ({"sampling_seed": "x"}, "sampling_seed must be an integer, got 'x'"),
        ({"ebnf": "root ::= ("}, "Failed to compile ebnf grammar"),
    ],
)
def test_a_script_refuses_what_an_engine_does(given: dict[str, Any], message: str) -> None:
    backend = sgl.TestBackend({"x": "a"})
    state = bound(**given).run(backend=backend)
    with pytest.raises(sgl.ProgramError, match=message) as told:
        _ = state["x"]
    assert isinstance(told.value.__cause__, RequestError)
    backend.shutdown()


def test_an_empty_prompt_is_refused_alike_by_a_script_and_an_engine(
    served: tuple[Engine, str],
) -> None:
    @sgl.function
    def program(s: sgl.ProgramState, expr: Any) -> None:
        s += expr

    backends: list[Any] = [sgl.TestBackend({"x": "a"}), sgl.EngineBackend(served[0])]
    for backend in backends:
        for expr in (sgl.gen("x", max_tokens=2), sgl.select("x", ["a", "b"])):
            error = program.run(expr, backend=backend).error()
            assert isinstance(error, sgl.ProgramError), backend
            cause = error.__cause__
            assert isinstance(cause, RequestError) and cause.param == "text", backend
            assert str(cause) == "text must hold at least one token."
        backend.shutdown()
