"""Bodies that need much work: off the event loop, counted before they are expanded, and never in
the way of others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import threading

import httpx
import pytest
from fake_server_engine import CONTEXT, Api
from starlette.requests import ClientDisconnect, Request
from test_lang_roles import TEMPLATES
from test_lang_speed import calls_of

from jserve.server import malformed, native, tokens
from jserve.server.bodies import ChatBody
from jserve.server.chat import prompt_ids
from jserve.server.exchange import LARGE_BODY, MAX_BODY_BYTES, made_of_body
from jserve.server.protocol import decode
from jserve.server.sequences import MAX_SEQUENCES
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer

CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
JSON = {"content-type": "application/json"}
ROUTES = {CHAT: "large-body", TEXT: "large-body", GEN: "large-body"}
ROUTES |= {"/tokenize": "tokens", "/detokenize": "tokens"}
LONG = "x" * (LARGE_BODY + 1)


@pytest.fixture
def readers(monkeypatch):
    """Names of the threads that read bodies which are no JSON."""
    names = []

    def json_error(raw, error):
        names.append(threading.current_thread().name)
        return before(raw, error)

    before = malformed.json_error
    monkeypatch.setattr(malformed, "json_error", json_error)
    return names


@pytest.mark.parametrize("path", ROUTES)
def test_large_bodies_are_read_in_threads_of_their_own_and_small_ones_at_once(path, readers):
    api = Api()
    for content in (b"{", b"{" + b" " * LARGE_BODY):
        response = api.call("POST", path, content=content, headers=JSON)
        assert response.status_code == 400 and "not valid JSON" in response.text
    small, large = readers
    assert small == "MainThread" and large.startswith(ROUTES[path])


@pytest.mark.parametrize("path", [CHAT, TEXT, GEN])
def test_a_server_of_several_ranks_looks_for_them_in_large_bodies_off_the_event_loop(path, readers):
    api = Api(dp_size=2)
    content = b'{"routed_dp_rank": 1, "user": "' + LONG.encode() + b'", "top_p": x}'
    assert api.call("POST", path, content=content, headers=JSON).status_code == 400
    assert readers[0].startswith("large-body")
    body = {"routed_dp_rank": 1, "prompt": "a", "max_tokens": 1, "user": LONG}
    assert api.post(TEXT, **body).status_code == 200
    assert api.engine.requests[0].routed_dp_rank == 1


def test_long_texts_are_made_into_tokens_and_back_in_the_same_threads():
    api, seen = Api(), []
    tokenizer = api.engine.tokenizer
    render, decode = tokenizer.apply_chat_template, tokenizer.decode

    def watched(function):
        def call(*arguments, **options):
            seen.append(threading.current_thread().name)
            return function(*arguments, **options)

        return call

    tokenizer.apply_chat_template, tokenizer.decode = watched(render), watched(decode)
    messages = [{"role": "user", "content": LONG}]
    response = api.post(CHAT, messages=messages)
    assert response.status_code == 400 and "context length" in response.json()["message"]
    assert api.ok("/detokenize", tokens=[97] * LARGE_BODY) == {"text": "a" * LARGE_BODY}
    assert [name.rpartition("_")[0] for name in seen] == ["large-body", "tokens"]


def test_texts_that_wait_to_be_tokenized_hold_up_no_large_chat():
    api, go_on = Api(), threading.Event()
    tokenizer, begun = api.engine.tokenizer, []
    decode = tokenizer.decode

    def slow(ids, **options):
        if len(ids) == LARGE_BODY:
            begun.append(1)
            assert go_on.wait(30)
        return decode(ids, **options)

    tokenizer.decode = slow

    async def run():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(api.app), base_url="http://api"
        ) as client:
            body = {"tokens": [97] * LARGE_BODY}
            slow_ones = [
                asyncio.create_task(client.post("/detokenize", json=body)) for _ in range(4)
            ]
            while len(begun) < tokens.NUM_THREADS:
                await asyncio.sleep(0.001)
            chat = {"messages": [{"role": "user", "content": "a"}], "user": LONG, "max_tokens": 1}
            answer = await client.post(CHAT, json=chat)
            assert len(begun) == tokens.NUM_THREADS and not go_on.is_set()
            go_on.set()
            return answer, await asyncio.gather(*slow_ones)

    answer, others = asyncio.run(run())
    assert answer.status_code == 200 and [one.status_code for one in others] == [200] * 4


def test_a_large_body_whose_client_left_is_not_looked_at_any_more():
    looked, go_on = [], threading.Event()
    sent = [b"x" * (LARGE_BODY + 1)]

    async def receive():
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        return {"type": "http.disconnect"}

    async def leave(pool):
        scope = {"type": "http", "method": "POST", "path": GEN, "query_string": b"", "headers": []}
        request = Request(scope | {"headers": [(b"content-type", b"application/json")]}, receive)
        with pytest.raises(ClientDisconnect):
            await made_of_body(request, looked.append, pool)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(go_on.wait, 30)
        asyncio.run(leave(pool))
        go_on.set()
    assert not looked


@pytest.mark.parametrize("length", ["9" * 5000, str(MAX_BODY_BYTES + 1)])
def test_a_length_that_no_body_has_is_413(length):
    api = Api()
    headers = JSON | {"content-length": length}
    response = api.call("POST", GEN, content=b"{}", headers=headers)
    assert response.status_code == 413


MANY = MAX_SEQUENCES + 1


@pytest.mark.parametrize(
    ("path", "body", "field", "wanted"),
    [
        (TEXT, {"prompt": ["a"] * MANY}, "prompt", MANY),
        (TEXT, {"prompt": [[97]] * MANY}, "prompt", MANY),
        (TEXT, {"prompt": ["a"] * 33, "n": 128}, "prompt", 33 * 128),
        (TEXT, {"prompt": ["a"] * 100_000, "n": 128}, "prompt", 12_800_000),
        (GEN, {"text": "a", "sampling_params": {"n": 10**9}}, "n", 10**9),
        (GEN, {"text": ["a"] * MANY}, "text", MANY),
        (GEN, {"input_ids": [[97]] * MANY}, "input_ids", MANY),
        (GEN, {"text": ["a"] * 33, "sampling_params": {"n": 128}}, "text", 33 * 128),
        (GEN, {"text": ["a"] * 33, "sampling_params": [{"n": 128}] * 33}, "text", 33 * 128),
    ],
)
def test_too_many_sequences_are_refused_before_any_is_made(path, body, field, wanted, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("expanded")

    monkeypatch.setattr(native, "expand", never)
    monkeypatch.setattr("jserve.server.openai.requests", never)
    response = Api().post(path, **body)
    message = f"{field}: at most 4096 sequences may be asked for at once, got {wanted}."
    assert response.status_code == 400 and message in response.text


def test_as_many_sequences_as_may_be_are_answered():
    api = Api()
    prompts = ["a"] * (MAX_SEQUENCES // 128)
    answer = api.ok(TEXT, prompt=prompts, n=128, max_tokens=1)
    assert len(answer["choices"]) == MAX_SEQUENCES and len(api.engine.requests) == len(prompts)


@pytest.mark.parametrize("prompt", ["x" * (2 * CONTEXT + 1), ["a", "x" * (2 * CONTEXT + 1)]])
def test_a_text_that_no_context_holds_is_not_tokenized(prompt):
    api = Api()
    response = api.post("/tokenize", prompt=prompt)
    assert response.status_code == 400
    assert f"prompt has {2 * CONTEXT + 1} characters, too many for a context" in response.text
    fits = "x" * (2 * CONTEXT)
    assert api.ok("/tokenize", prompt=fits, add_special_tokens=False)["count"] == 2 * CONTEXT


@pytest.mark.parametrize("parts", [False, True])
def test_a_chat_of_twice_the_messages_takes_at_most_two_and_a_half_times_the_calls(parts):
    tokenizer = Tokenizer(byte_source(256, templates={"default": TEMPLATES["smol"]}))

    def read(count: int) -> list[int]:
        content = [{"type": "text", "text": "a word"}] if parts else "a word"
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": next(roles), "content": content} for _ in range(count)]
        raw = json.dumps({"messages": messages}).encode()
        return prompt_ids(tokenizer, decode(raw, ChatBody))

    assert len(read(8)) > 8 * len("a word")
    small, large = (calls_of(read, size) for size in (400, 800))
    assert small > 400 and large < 2.5 * small, f"{small=} {large=}"
