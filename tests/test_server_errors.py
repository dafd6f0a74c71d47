"""Bad requests: each is a 4xx that names the field, and the next good request is answered."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from typing import Literal

import msgspec
import pytest
from fake_server_engine import CONTEXT, Api

from jserve.engine.misfit import misfit
from jserve.errors import RequestError
from jserve.server import exchange
from jserve.server.app import create_app
from jserve.server.protocol import Body, decode
from jserve.server.replies import error_response

CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

# (path, fields that are wrong, what the message must name); the rest of the body is good.
BAD = [
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"chat_template_kwargs": {"tools": [{"name": "f"}]}}, "chat_template_kwargs.tools"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": "5"}, "max_tokens"),
    (CHAT, {"max_tokens": 2.5}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"max_tokens": CONTEXT}, "max_tokens"),
    (CHAT, {"max_tokens": 10**30}, "max_tokens"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_p": 2}, "top_p"),
    (CHAT, {"top_k": 0}, "top_k"),
    (CHAT, {"min_p": 1.5}, "min_p"),
    (CHAT, {"frequency_penalty": 3}, "frequency_penalty"),
    (CHAT, {"presence_penalty": -3}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 1000}, "n"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"seed": "lucky"}, "seed"),
    (CHAT, {"stop": 5}, "stop"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["x"] * 33}, "stop"),
    (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 1e38}}, "logit_bias"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"stream": 1}, "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT, {"stream": True, "temperature": 9e999}, "temperature"),
    (CHAT, {"rid": ["a", "b"]}, "rid"),
    (CHAT, {"model": 5}, "model"),
    (CHAT, {"user": 5}, "user"),
    (CHAT, {"input_ids": [1, 99999]}, "input_ids"),
    (CHAT, {"frobnicate": 1}, "frobnicate"),
    (CHAT, {"rid": "x" * 257}, "rid"),
    (CHAT, {"rid": ["x" * 100_000]}, "rid"),
    (CHAT, {"extra_key": "x" * 257}, "extra_key"),
    (CHAT, {"cache_salt": "x" * 257}, "cache_salt"),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"service_tier": "priority"}, "service_tier"),
    (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {"response_format": {"schema": {}}}, "response_format.type"),
    (CHAT, {"response_format": "json_object"}, "response_format"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "schema": {}}},
        "response_format.json_schema.schema",
    ),
    (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    (CHAT, {"response_format": {}}, "response_format.type"),
    (CHAT, {"regex": "a+", "ebnf": "root ::= x"}, "ebnf"),
    (CHAT, {"regex": 3}, "regex"),
    (CHAT, {"choices": ["a", ""]}, "choices"),
    (CHAT, {"json_object": "yes"}, "json_object"),
    (CHAT, {"stop_regex": ["a+", "b("]}, "stop_regex"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"lora_path": "x"}, "lora_path"),
    (CHAT, {"session_params": {"id": "x"}}, "session_params"),
    (CHAT, {"custom_logit_processor": "x"}, "custom_logit_processor"),
    (CHAT, {"return_hidden_states": True}, "return_hidden_states"),
    (CHAT, {"priority": "high"}, "priority"),
    (CHAT, {"bootstrap_room": 0}, "bootstrap_room"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": 7}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [1.5]}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [[-1]]}, "prompt"),
    (TEXT, {"prompt": "x" * CONTEXT}, "prompt"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"messages": HELLO}, "messages"),
    (TEXT, {"prompt": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    (GEN, {"text": None}, "text"),
    (GEN, {"text": 3}, "text"),
    (GEN, {"text": []}, "text"),
    (GEN, {"input_ids": [1]}, "text"),
    (GEN, {"text": None, "input_ids": [1, [2]]}, "input_ids"),
    (GEN, {"text": None, "input_ids": [True]}, "input_ids"),
    (GEN, {"text": "x" * CONTEXT}, "text"),
    (GEN, {"sampling_params": 5}, "sampling_params"),
    (GEN, {"sampling_params": {"top_p": 2}}, "top_p must be in (0, 1], got 2"),
    (GEN, {"sampling_params": {"top_p": "1"}}, "top_p"),
    (GEN, {"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    (GEN, {"sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
    (GEN, {"sampling_params": {"regex": "a", "json_schema": {}}}, "regex"),
    (GEN, {"sampling_params": {"regex": ["a"]}}, "regex"),
    (GEN, {"sampling_params": {"json_schema": 3}}, "json_schema"),
    (GEN, {"sampling_params": {"json_schema": []}}, "json_schema"),
    (GEN, {"sampling_params": {"json_schema": ""}}, "json_schema"),
    (GEN, {"sampling_params": {"regex": ""}}, "regex"),
    (GEN, {"sampling_params": {"ebnf": ""}}, "ebnf"),
    (GEN, {"sampling_params": {"choices": []}}, "choices"),
    (GEN, {"sampling_params": {"choices": {"a": 1}}}, "choices"),
    (GEN, {"sampling_params": {"choices": "abc"}}, "choices"),
    (CHAT, {"choices": []}, "choices"),
    (CHAT, {"regex": ""}, "regex"),
    (GEN, {"sampling_params": {"choices": "a", "json_object": True}}, "json_object"),
    (GEN, {"sampling_params": {"json_object": 1}}, "json_object"),
    (GEN, {"sampling_params": {"max_tokens": 5}}, "max_tokens"),
    (GEN, {"sampling_params": [{}, {}]}, "sampling_params"),
    (GEN, {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    (GEN, {"return_logprob": 1}, "return_logprob"),
    (GEN, {"rid": "x" * 257}, "rid"),
    (GEN, {"text": ["a", "b"], "rid": ["x", "y" * 300]}, "rid"),
    (GEN, {"extra_key": "x" * 257}, "extra_key"),
    (GEN, {"cache_salt": ["x" * 257]}, "cache_salt"),
    (GEN, {"top_logprobs_num": 2}, "top_logprobs_num"),
    (
        GEN,
        {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [0, 2]},
        "top_logprobs_num",
    ),
    (GEN, {"return_logprob": True, "logprob_start_len": CONTEXT}, "logprob_start_len"),
    (GEN, {"sampling_params": {"n": 10**9}}, "n"),
    (GEN, {"text": ["a"] * 5000}, "text"),
    (GEN, {"image_data": "x.png"}, "image_data"),
    (GEN, {"lora_path": "x"}, "lora_path"),
    (GEN, {"max_new_tokens": 5}, "max_new_tokens"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": 5}, "rid"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
    ("/detokenize", {"tokens": [9999]}, "tokens"),
]
GOOD = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "abc"}, GEN: {"text": "abc"}}


def test_bad_fields_are_400_naming_the_field_and_the_next_good_request_is_answered():
    api = Api()
    for path, fields, name in BAD:
        body = {**GOOD.get(path, {}), **fields}
        response = api.call("POST", path, content=json.dumps(body), headers=JSON)
        assert response.status_code == 400, (path, fields, response.text)
        answer = response.json()
        message = answer["error"]["message"] if not path.startswith("/v1") else answer["message"]
        assert name in message, (path, fields, message)
        if path.startswith("/v1"):
            assert set(answer) == {"object", "message", "type", "param", "code"}
            assert (answer["object"], answer["code"]) == ("error", 400)
            assert str(answer["param"]).startswith(name) or name == "input_ids", (fields, answer)
    assert len(BAD) >= 60 and not api.engine.open
    for path, body in GOOD.items():
        assert api.post(path, **body).status_code == 200


def test_values_that_ask_for_nothing_pass():
    api = Api()
    for fields in (
        {"audio": None},
        {"modalities": ["text"]},
        {"modalities": None},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tools": []},
        {"rid": "x" * 256},
    ):
        api.ok(CHAT, messages=HELLO, **fields)


def error_of(path, **fields):
    answer = Api().post(path, **{**GOOD[path], **fields})
    assert answer.status_code in (400, 404), answer.text
    return answer.json()["error"] if path == GEN else answer.json()["message"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 5}, "seed is not a sampling parameter; did you mean sampling_seed?"),
        ({"max_tokens": 5}, "max_tokens is not a sampling parameter; did you mean max_new_tokens?"),
        ({"temprature": 5}, "did you mean temperature?"),
        ({"stop_strings": "a"}, "did you mean stop?"),
        ({"zzz": 5}, "zzz is not a sampling parameter."),
        ({"logit_bias": {"x": 1}}, "logit_bias must be a map from token ids to numbers, got"),
        ({"logit_bias": [1]}, "logit_bias must be a map from token ids to numbers, got [1]."),
        ({"stop": 3}, "stop must be a string or a list of strings, got 3."),
        ({"stop": ["a", 3]}, "stop must be a string or a list of strings, got ['a', 3]."),
        ({"stop_regex": {}}, "stop_regex must be a string or a list of strings, got {}."),
        ({"stop_token_ids": "a"}, "stop_token_ids must be a list of token ids, got 'a'."),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1."),
        ({"n": 1.5}, "n must be an integer, got 1.5."),
        ({"top_p": "x"}, "top_p must be a number, got 'x'."),
    ],
)
def test_native_sampling_parameters_are_refused_in_plain_words(given, message):
    assert message in error_of(GEN, sampling_params=given)["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/pause_generation", {"mode": "x"}, "mode must be one of abort, in_place, retract, got"),
        (CHAT, {"service_tier": "x"}, "service_tier must be one of auto, default, got 'x'."),
        (
            CHAT,
            {"messages": [{"role": "king", "content": ""}]},
            "messages[0].role must be one of assistant, developer, function, system, tool, user, "
            "got 'king'.",
        ),
    ],
)
def test_a_choice_that_is_none_is_refused_with_those_there_are(path, fields, message):
    answer = Api().post(path, **{**GOOD.get(path, {}), **fields})
    assert answer.status_code == 400 and message in answer.text.replace("\\", ""), answer.text


class Inner(Body):
    kind: Literal["a", "b"] | None = None


class Outer(Body):
    one: Inner | None = None
    many: list[Inner] = msgspec.field(default_factory=list)
    named: dict[str, Inner] = msgspec.field(default_factory=dict)
    plain: list[Literal["x", "y"]] = msgspec.field(default_factory=list)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"one": {"kind": "c"}}, "one.kind must be one of a, b, got 'c'."),
        ({"many": [{"kind": "c"}]}, ".kind must be one of a, b, got 'c'."),
        ({"named": {"k": {"kind": "c"}}}, ".kind must be one of a, b, got 'c'."),
        ({"plain": ["x", "c"]}, "must be one of x, y, got 'c'."),
    ],
)
def test_the_choices_of_a_field_are_found_wherever_it_lies(fields, message):
    with pytest.raises(RequestError) as caught:
        decode(json.dumps(fields).encode(), Outer)
    assert str(caught.value).endswith(message), caught.value


def test_other_fields_are_refused_in_plain_words():
    assert error_of(CHAT, stop=3) == "stop: Expected string or list, got integer."
    assert "Expected integer, got string" in error_of(CHAT, logit_bias={"a": 1})
    assert error_of(CHAT, temprature=1) == (
        "temprature is not a known field; did you mean temperature?"
    )
    assert error_of(CHAT, max_new_tokens=1).endswith("did you mean max_tokens?")
    assert error_of(TEXT, stop_sequences=[]).startswith("stop_sequences is not a known field")


def test_what_was_sent_comes_back_cut_when_it_is_long():
    long = "x" * 100_000
    for path, fields in (
        (CHAT, {"model": long}),
        (CHAT, {long: 1}),
        (CHAT, {"stop_regex": "(" + long}),
        (CHAT, {"messages": [{"role": long, "content": ""}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        (CHAT, {"chat_template_kwargs": {long: 1, "messages": 1}}),
        (TEXT, {"prompt": ["a", "b"], "rid": [long[:200]] * 2}),
        (GEN, {"sampling_params": {"stop": {long: 1}}}),
        (GEN, {"sampling_params": {long: 1}}),
        (GEN, {"sampling_params": {"top_p": long}}),
        (GEN, {"sampling_params": long}),
        (GEN, {long: 1}),
    ):
        answer = Api().post(path, **{**GOOD[path], **fields})
        assert answer.status_code in (400, 404) and len(answer.content) < 2000, path
    message = error_of(CHAT, model=long)
    assert message.endswith("is not served here; use 'fake/model'.") and " … " in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"prompt": "a"}}', "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800 lone"}', "prompt must not hold lone surrogates"),
        (b'{"prompt": "\\ud800"}', "prompt must not hold lone surrogates"),  # at the very end
        (b'{"prompt": ["a", "\\udc00"]}', "prompt[1] must not hold lone surrogates"),
        (b'{"prompt": "a", "stop": ["b", "\\ud83d!"]}', "stop[1] must not hold lone surrogates"),
        (b'{"prompt": "a", "rid": "\\uD800\\u0041"}', "rid must not hold lone surrogates"),
        (b'{"messages": [{"content": "\\udfff"}]}', "messages[0].content must not hold lone"),
        (b'{"logit_bias": {"\\udfff": 1}}', "logit_bias must not hold lone surrogates"),
        (b'{"\\udfff": 1}', "body must not hold lone surrogates"),
        (b'{"prompt": "\\ud83d\\ude00", "stop": }', "not valid JSON"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b'{"prompt": "a", "top_p": NaN}', "top_p"),
        (b'{"prompt": "a", "temperature": -Infinity}', "temperature"),
        (b'{"prompt": "NaN", "logit_bias": {"5": [ NaN]}}', "5 must be a finite number"),
        (b'{"prompt": "top_p: NaN", }', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 200_000, "deeply"),
    ],
)
def test_bodies_that_are_no_json_object_are_400(content, word):
    api = Api()
    response = api.call("POST", TEXT, content=content, headers=JSON)
    assert response.status_code == 400 and word in response.json()["message"], response.text
    assert api.post(TEXT, prompt="a").status_code == 200


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b'{"text":' + b" " * 200_000 + b"x}", "not valid JSON"),
        (b'{"text":' + b"[-" * 500 + b"NaN}", "not valid JSON"),
        (b'{"a":' * 500 + b" " * 200_000 + b"NaN", "not valid JSON"),
        (b'"' * 200_000 + b":NaN", "not valid JSON"),
        (b"[" * 200 + b"1," * 50_000 + b'"\\ud800"' + b"]" * 200, "lone surrogates"),
    ],
)
def test_what_is_wrong_with_a_long_body_is_found_in_linear_time(content, word):
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(RequestError, match=word):
            decode(content, Body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1.5  # a quadratic search of 200 KB takes minutes
    assert peak < 50 * len(content)  # as the path of every number would not


def test_every_route_refuses_what_it_does_not_take_in_a_query_string():
    api = Api(enable_metrics=True)
    asked = []
    for route in api.app.routes:
        path = route.path.replace("{model:path}", "default")
        for method in sorted(route.methods):
            body = {"json": GOOD.get(path, {})} if method in ("POST", "PUT") else {}
            response = api.call(method, f"{path}?colour=red", **body)
            asked.append((method, path))
            if path in ("/", "/health", "/ready", "/health_generate"):
                assert response.status_code == 200, (method, path)
                continue
            assert response.status_code == 400, (method, path, response.text)
            assert "colour is not a query parameter of" in response.text, response.text
    assert len(asked) > 25 and ("PUT", GEN) in asked
    # the probes alone ran
    assert all(request.rid.startswith("HEALTH_CHECK_") for request in api.engine.requests)
    assert {op for op, _ in api.engine.controls} == {"server_info"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("time_out=3", "time_out is not a query parameter of /flush_cache; did you mean timeout?"),
        ("x=3", "x is not a query parameter of /flush_cache; it takes timeout."),
        ("timeout=3&timeout=4", "timeout must be given once."),
        ("timeout=", "timeout must be seconds, got ''"),
        ("timeout=nan", "timeout must be seconds"),
    ],
)
def test_what_flush_cache_does_not_understand_does_not_flush(query, message):
    for method in ("GET", "POST"):
        api = Api()
        response = api.call(method, f"/flush_cache?{query}")
        assert response.status_code == 400 and not api.engine.controls
        assert message in response.json()["error"]["message"]


def test_flush_cache_takes_no_body_and_reads_none():
    api = Api()
    sent = []

    async def endless():
        while len(sent) < 100:
            sent.append(b" " * 1000)
            yield sent[-1]

    response = api.call("POST", "/flush_cache", content=endless())
    assert response.status_code == 400 and "takes no body" in response.text and len(sent) == 1
    assert api.call("POST", "/flush_cache", content=b"{").status_code == 400
    response = api.post("/flush_cache", timeout=3)
    assert response.status_code == 400 and "query string" in response.text
    assert not api.engine.controls
    assert api.post("/flush_cache").status_code == 200  # {}
    assert api.call("POST", "/flush_cache").status_code == 200


def test_other_content_types_are_400():
    api = Api()
    for path in (TEXT, GEN):
        headers = {"content-type": "text/plain"}
        response = api.call("POST", path, content=b"{}", headers=headers)
        assert response.status_code == 400 and "Content-Type" in response.text
    assert api.call("POST", TEXT, content=b'{"prompt": "a"}').status_code == 400
    assert api.call("POST", GEN, content=b'{"text": "a"}').status_code == 200


def test_an_unknown_model_is_404_and_names_the_served_one():
    response = Api().post(CHAT, model="gpt-9", messages=HELLO)
    answer = response.json()
    assert response.status_code == 404 and answer["param"] == "model"
    assert answer["type"] == "NotFoundError" and "fake/model" in answer["message"]


def test_huge_bodies_are_413_declared_or_not(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 1000)
    api = Api()

    async def pieces():
        for _ in range(3):
            yield b" " * 500

    for content in (b" " * 1001, pieces()):
        response = api.call("POST", TEXT, content=content, headers=JSON)
        assert response.status_code == 413, response.text
    assert api.post(TEXT, prompt="a").status_code == 200


def test_the_key_guards_everything_but_probes():
    api = Api(api_key="sécret", enable_metrics=True)
    for value in (None, "", "Bearer", "Bearer wrong", "Bearer sécret2", "Basic sécret"):
        headers = {} if value is None else {"authorization": value.encode()}
        for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/server_info")):
            response = api.call(method, path, headers=headers)
            assert response.status_code == 401, (value, path)
            assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["message"]
    for path in ("/health", "/health_generate", "/ready", "/metrics"):
        assert api.call("GET", path).status_code == 200
    headers = {"authorization": "Bearer sécret".encode()}
    assert api.call("POST", TEXT, json={"prompt": "a"}, headers=headers).status_code == 200


def test_unknown_routes_and_methods_have_the_error_shape_of_their_api():
    api = Api()
    response = api.call("GET", "/v1/nothing")
    assert response.status_code == 404 and response.json()["object"] == "error"
    response = api.call("GET", "/nothing")
    assert response.status_code == 404 and response.json()["error"]["message"]
    response = api.call("GET", CHAT)
    assert response.status_code == 405 and response.json()["code"] == 405
    assert response.headers["allow"] == "POST"


def test_while_the_model_loads_everything_but_probes_is_503():
    api = Api()
    api.app = create_app(None, api.config)
    for path, body in (*GOOD.items(), ("/tokenize", {"prompt": "a"}), ("/abort_request", {})):
        response = api.post(path, **body)
        assert response.status_code == 503 and "starting" in response.text, path
    for path in ("/v1/models", "/server_info", "/model_info", "/flush_cache", "/health", "/ready"):
        assert api.call("GET", path).status_code == 503, path
    assert api.call("GET", "/").status_code == 200


def test_a_full_queue_and_a_dead_engine_are_503():
    api = Api()
    api.engine.queue_full = True
    for body in ({}, {"stream": True}):
        response = api.post(TEXT, prompt="a", **body)
        assert response.status_code == 503 and "full" in response.json()["message"]
    api.engine.healthy = False
    for path, body in GOOD.items():
        assert api.post(path, **body).status_code == 503
    assert api.call("GET", "/server_info").status_code == 503


@pytest.mark.parametrize("path", [TEXT, GEN])
def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(path):
    api = Api()

    async def die_soon():
        while not api.engine.open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        api.engine.die()

    async def run():
        import httpx

        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(api.app), base_url="http://api"
        ) as client:
            body = {"prompt" if path == TEXT else "text": "hang", "stream": True}
            if path == GEN:
                body = {"input_ids": list(b"hang"), "stream": True}
            answer, _ = await asyncio.gather(client.post(path, json=body), die_soon())
            return answer

    response = asyncio.run(run())
    events = response.text.split("\n\n")
    assert response.status_code == 200 and events[-2] == "data: [DONE]"
    error = json.loads(events[-3].removeprefix("data: "))["error"]
    assert "ended" in error["message"] and error["code"] == 503


def test_one_bad_prompt_of_a_batch_fails_the_request_and_ends_the_others():
    api = Api()
    long = "x" * CONTEXT
    response = api.post(TEXT, prompt=["hang", long], max_tokens=1)
    assert response.status_code == 400 and not api.engine.open
    response = api.post(GEN, text=["abc", long])
    assert response.status_code == 400 and not api.engine.open


def test_a_fault_of_ours_is_a_500_without_its_details():
    api = Api()
    api.engine.model_config = None
    response = api.call("POST", TEXT, strict=False, json={"prompt": "a"})
    assert response.status_code == 500 and response.json()["message"] == "Internal error."


@pytest.mark.parametrize(
    ("path", "named"),
    [(CHAT, "messages: The prompt"), (TEXT, "The prompt"), (GEN, "input_ids: The prompt")],
)
def test_a_prompt_that_is_too_long_is_named_once_as_its_route_calls_it(path, named):
    error = misfit("input_ids", [1] * 9, wanted=1, vocab_size=10, context=5)
    answer = json.loads(error_response(error, path).body)
    told = answer["error"]["message"] if path == GEN else answer["message"]
    assert told == f"{named} has 9 tokens, but the context length is 5."
