"""Programs through OpenAI's API, on a scripted server; and one program on every backend."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from native_server import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from test_lang_engine import TEMPLATE, chat

import jserve.lang as sgl
from jserve.engine.engine import Engine
from jserve.errors import RequestError
from jserve.server.app import create_app
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]
SYNTAX = {"response_format", "regex", "ebnf", "structural_tag"}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Scripted:
    """Chat answers tell how many messages came; completions follow the bias; what should follow a
    syntax is `bound`. `end` is how answers end."""

    def __init__(self):
        self.requests = []
        self.end, self.bound = {"finish_reason": "stop"}, "{}"
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def chat(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        if body["model"] == "missing":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        text = self.bound if SYNTAX & body.keys() else f"{len(body['messages'])} messages"
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, **self.end}
            return JSONResponse({"choices": [choice] * body["n"], "usage": USAGE})

        async def events():
            for word in (text[:1], text[1:]):
                choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            last = {"index": 0, "delta": {}, **self.end}
            yield f"data: {json.dumps({'choices': [last]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def completions(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        biased = [int(token) for token in body.get("logit_bias", {})]
        text = chr(max(biased)) if biased else f"<{body['prompt'][-3:]}>"
        text = self.bound if SYNTAX & body.keys() else text
        if body.get("stream"):
            choice = {"choices": [{"text": text, **self.end}]}
            return StreamingResponse([f"data: {json.dumps(choice)}\n\n", "data: [DONE]\n\n"])
        return JSONResponse({"choices": [{"text": text, **self.end}], "usage": USAGE})


@pytest.fixture
def server():
    one = Scripted()
    with running(one.app) as url:
        one.url = f"{url}/v1"
        yield one


@pytest.fixture
def open_backend(server):
    made = []

    def make(model="gpt-4", **options):
        made.append(sgl.OpenAI(model, base_url=server.url, api_key="k", **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@sgl.function
def talk(s):
    s += sgl.system("S") + sgl.user("U")
    s += sgl.assistant(sgl.gen("a", max_tokens=9, stop="!"))
    s += sgl.user("V") + sgl.assistant(sgl.gen("b", json_schema={"type": "object"}))


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_model_gets_messages_and_openais_fields(server, open_backend, stream):
    state = talk.run(backend=open_backend(), temperature=0, stream=stream)
    assert state["a"] == "2 messages" and state["b"] == "{}"
    first, second = server.requests
    expected = {"model": "gpt-4", "max_tokens": 9, "temperature": 0, "top_p": 1.0, "n": 1}
    expected |= {"stop": ["!"]}
    if stream:
        expected |= {"stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert first == expected | {"messages": messages}
    assert [message["content"] for message in second["messages"]] == ["S", "U", "2 messages", "V"]
    schema = second["response_format"]["json_schema"]
    assert schema["schema"] == {"type": "object"} and schema["strict"] is True
    assert state.usage == sgl.Usage(14, 8, 4, 2)


def test_a_chat_model_answers_with_whole_messages_only(open_backend):
    @sgl.function
    def halfway(s):
        s += sgl.user("U") + sgl.assistant("It is " + sgl.gen("a"))

    @sgl.function
    def bare(s):
        s += "It is " + sgl.gen("a")

    @sgl.function
    def chosen(s):
        s += sgl.user("U") + sgl.assistant(sgl.select("a", ["x", "y"]))

    for program, message in (
        (halfway, "gen must directly follow the beginning of the assistant's role"),
        (bare, "gen must directly follow"),
        (chosen, "select through OpenAI's API needs a completion model"),
    ):
        assert message in str(program.run(backend=open_backend()).error())


def test_a_completion_model_gets_the_text(server, open_backend):
    backend = open_backend("gpt-3.5-turbo-instruct")
    assert not backend.is_chat_model
    state = talk.run(backend=backend, temperature=0)
    assert server.requests[0]["prompt"] == "SYSTEM:S\nUSER:U\nASSISTANT:"
    assert state["a"] == "<NT:>"


def test_select_walks_the_choices_by_their_biased_tokens(server, open_backend):
    @sgl.function
    def program(s):
        s += "Pick " + sgl.select("x", ["red", "rose", "rust"])

    backend = open_backend("x-instruct", encode=lambda text: list(text.encode()))
    assert program.run(backend=backend)["x"] == "rust"  # the stand-in takes the highest id
    biases = [request["logit_bias"] for request in server.requests]
    assert biases == [{"114": 100}, {"101": 100, "111": 100, "117": 100}]
    lacking = program.run(backend=open_backend("x-instruct"))
    assert "needs encode=, the model's tokenizer" in str(lacking.error())


def test_what_the_api_refuses_is_told(open_backend):
    state = talk.run(backend=open_backend("missing"))
    assert "POST /chat/completions → 404" in str(state.error())
    assert "no such model" in str(state.error())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["gpt-4", "x-instruct"])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ({"finish_reason": "abort", "abort_message": "Out of memory."}, "aborted: Out of memory."),
        ({"finish_reason": "abort"}, "aborted: no reason given"),
        ({"finish_reason": "content_filter"}, "content filter ended the answer"),
    ],
)
def test_an_answer_that_was_broken_off_is_an_error(
    server, open_backend, end, message, model, stream
):
    server.end = end
    state = talk.run(backend=open_backend(model), stream=stream)
    error = state.error()
    assert isinstance(error, sgl.ProgramError) and message in str(error), error
    with pytest.raises(sgl.ProgramError, match="gen\\('a'\\)"):
        _ = state["a"]
    assert len(server.requests) == 1


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": r"^\p{Lu}"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"age": 7,\n\t"name": "Ann"}'  # in another order than the schema's
TAG = {"format": {"type": "const_string", "value": "yes"}}
FITTING: list[tuple[dict[str, Any], str, str]] = [  # (asked for, answer, finish_reason)
    ({"regex": "[1-5]"}, "3", "stop"),
    ({"regex": "[a-z]{9}"}, "abc", "length"),
    ({"regex": "a+,b", "stop": ","}, "aa", "stop"),
    ({"dtype": int}, "-12", "stop"),
    ({"json_schema": PERSON}, ANN, "stop"),
    ({"json_schema": PERSON}, ANN[:-5], "length"),
    ({"json_schema": "$$ANY$$"}, " [1, null]\n", "stop"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}}, "1", "stop"),
    ({"json_object": True}, '{"a": []}', "stop"),
    ({"ebnf": 'root ::= "a" [0-9]'}, "a1", "stop"),
    ({"structural_tag": TAG}, "yes", "stop"),
]
NOT_FITTING = [
    ({"regex": "[1-5]"}, "I say 3", "stop", "regex [1-5]: it does not allow this text"),
    ({"regex": "[a-z]{9}"}, "abc", "stop", "does not allow"),
    ({"regex": "[a-z]{9}"}, "Sure, abc", "length", "does not allow"),
    ({"dtype": int}, "twelve", "stop", "does not match its regex"),
    ({"json_schema": PERSON}, "Sure! Here is", "stop", "json_schema: it is not JSON"),
    ({"json_schema": PERSON}, "Sure! Here is", "length", "it is not JSON"),
    ({"json_schema": PERSON}, f"```json\n{ANN}\n```", "stop", "it is not JSON"),
    ({"json_schema": PERSON}, ANN[:-5], "stop", "it is not JSON"),
    ({"json_schema": PERSON}, ANN.replace("7", '"7"'), "stop", "at $.age: '7' is not of type"),
    ({"json_schema": PERSON}, ANN.replace("Ann", "ann"), "stop", "at $.name: 'ann' does not match"),
    ({"json_schema": {"type": "number"}}, "NaN", "stop", "NaN is not JSON"),
    ({"json_schema": {"$ref": "http://a.b/c"}}, "1", "stop", "cannot be checked here"),
    ({"json_object": True}, "[1]", "stop", "json_object: at $: [1] is not of type 'object'"),
    ({"ebnf": 'root ::= "a" [0-9]'}, "b1", "stop", "ebnf: it does not allow"),
    ({"structural_tag": TAG}, "no", "stop", "structural_tag: it does not allow"),
]


def bound(server, backend, asked, answer, reason, **run):
    @sgl.function
    def program(s):
        s += sgl.user("U") + sgl.assistant(sgl.gen("a", **asked))

    server.bound, server.end = answer, {"finish_reason": reason}
    return program.run(backend=backend, **run)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["gpt-4", "x-instruct"])
def test_an_answer_that_fits_what_was_asked_for_is_taken(server, open_backend, model, stream):
    backend = open_backend(model)
    for asked, answer, reason in FITTING:
        state = bound(server, backend, asked, answer, reason, stream=stream)
        assert state.error() is None and state["a"] == answer, asked
        assert SYNTAX & server.requests[-1].keys(), asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["gpt-4", "x-instruct"])
def test_an_answer_of_a_server_that_ignored_the_syntax_is_an_error_at_its_line(
    server, open_backend, model, stream
):
    backend = open_backend(model)
    for asked, answer, reason, message in NOT_FITTING:
        state = bound(server, backend, asked, answer, reason, stream=stream)
        error = state.error()
        assert isinstance(error, sgl.ProgramError) and message in str(error), (asked, error)
        assert re.match(
            r".*test_lang_openai\.py:\d+, in program: gen\('a'\): the answer", str(error)
        )
        assert isinstance(error.__cause__, sgl.BackendError)
        with pytest.raises(sgl.ProgramError):
            _ = state["a"]


def test_every_one_of_n_answers_must_fit(server, open_backend):
    state = bound(server, open_backend(), {"regex": "[1-5]", "n": 2}, "9", "stop")
    assert "the answer, '9', does not match" in str(state.error())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": {"type": "strange"}}, "json_schema: at $.type: 'strange' is not valid"),
        ({"ebnf": "root ::= ("}, "Failed to compile ebnf grammar"),
    ],
)
def test_what_no_answer_can_be_held_against_is_refused_unasked(
    server, open_backend, asked, message
):
    error = bound(server, open_backend(), asked, "1", "stop").error()
    assert isinstance(error, sgl.ProgramError) and message in str(error), error
    assert isinstance(error.__cause__, RequestError) and server.requests == []


def test_a_select_that_was_broken_off_is_an_error(server, open_backend):
    @sgl.function
    def program(s):
        s += "Pick " + sgl.select("x", ["red", "rose"])

    server.end = {"finish_reason": "abort", "abort_message": "Gone."}
    backend = open_backend("x-instruct", encode=lambda text: list(text.encode()))
    assert "aborted: Gone." in str(program.run(backend=backend).error())


def test_n_answers_are_a_list(open_backend):
    @sgl.function
    def program(s):
        s += sgl.user("U") + sgl.assistant(sgl.gen("a", n=2))

    assert program.run(backend=open_backend())["a"] == ["1 messages"] * 2


@pytest.fixture(scope="module")
def served():
    """jserve's own server on an engine whose next token is a formula."""
    tokenizer = Tokenizer(byte_source(256, templates={"default": TEMPLATE}))
    with (
        Engine("fake", inline=True, builder="tests.fake_engine:build", tokenizer=tokenizer) as one,
        running(create_app(one, one.config)) as url,
    ):
        yield one, url


def test_a_program_gives_the_same_variables_on_every_backend(served):
    engine, url = served
    backends = {
        "engine": sgl.EngineBackend(engine),
        "endpoint": sgl.RuntimeEndpoint(url),
        "openai": sgl.OpenAI("fake", base_url=f"{url}/v1", api_key="none"),
    }
    seen = {}
    for name, backend in backends.items():
        state = chat.run("What is it?", backend=backend, temperature=0)
        seen[name] = (state["a"], state["b"], state.messages(), state.usage.prompt_tokens)
        if name != "openai":  # whose text is only a picture: the server applies the template
            seen[f"text of {name}"] = state.text()
        backend.shutdown()
    assert seen["engine"] == seen["endpoint"] == seen["openai"]
    assert seen["text of engine"] == seen["text of endpoint"]
    assert len(seen["engine"][0]) == 6


def test_choices_branches_and_streams_are_the_same_over_http(served):
    engine, url = served

    @sgl.function
    def program(s):
        s += "A text that is longer than one page, and then a choice: "
        s += sgl.select("x", ["b", "a", "cc"])
        branches = s.fork(2)
        branches += lambda i: f"{i}" + sgl.gen("y", max_tokens=3)
        branches.join()
        s += sgl.gen("z", max_tokens=9)

    seen = []
    for backend in (sgl.EngineBackend(engine), sgl.RuntimeEndpoint(url)):
        for stream in (False, True):
            backend.flush_cache()
            state = program.run(backend=backend, temperature=0, stream=stream)
            assert "".join(state.text_iter("z")) == state["z"]
            scores = state.get_meta_info("x")["normalized_prompt_logprobs"]
            seen.append((state.text(), state["y"], scores, state.usage))
        backend.shutdown()
    assert seen[0][0].count("choice: a") == 1 and len(seen) == 4
    assert all(one == seen[0] for one in seen)


def test_an_endpoint_takes_its_roles_from_the_servers_own_template(served):
    """The bytes before an answer are those that the server makes of the same messages."""
    engine, url = served
    sent = []
    make = engine.generate_stream

    def watching(request, *rest):
        sent.append(request)
        return make(request, *rest)

    engine.generate_stream = watching
    try:
        for backend in (
            sgl.RuntimeEndpoint(url),
            sgl.OpenAI("fake", base_url=f"{url}/v1", api_key="none"),
        ):
            chat.run("What is it?", backend=backend, temperature=0)
            backend.shutdown()
    finally:
        engine.generate_stream = make
    texts = [list(one.text.encode()) for one in sent if one.text is not None]
    ids = [one.input_ids for one in sent if one.text is None]
    assert len(texts) == len(ids) == 2 and texts == ids


def test_clients_leave_no_thread_behind(served):
    def once():
        backend = sgl.RuntimeEndpoint(served[1])
        chat.run("?", backend=backend, temperature=0)
        backend.shutdown()

    once()  # the server, in this process too, starts its own
    before = set(threading.enumerate())
    for _ in range(3):
        once()
    assert set(threading.enumerate()) <= before


def test_an_api_that_is_none_or_nowhere_is_told_by_its_address():
    untyped: Any = sgl.OpenAI
    for given in ({"base_url": 5}, {"base_url": "localhost:9"}, {"model_name": None}):
        with pytest.raises(sgl.ExpressionError, match=rf"^{next(iter(given))} must be a "):
            untyped(**{"model_name": "m", **given})
    backend = sgl.OpenAI("m", base_url="http://127.0.0.1:9/v1")
    assert "POST /chat/completions at http://127.0.0.1:9/v1: " in str(
        talk.run(backend=backend).error()
    )
    backend.shutdown()
