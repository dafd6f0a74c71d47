"""SGLang's native routes over a fake engine: /generate, health, facts, control, tokenization."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_server_engine import BOS, CONTEXT, Api, expected, logprob

from jserve.server import health

ABC_IDS = [BOS, *b"abc"]


def client_of(api):
    return httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://api")


def params(**sampling):
    return {"max_new_tokens": 3, **sampling}


def test_generate_answers_text_ids_and_meta_info():
    api = Api()
    body = api.ok("/generate", text="abc", sampling_params=params(), rid="one")
    assert body["text"] == expected(ABC_IDS, 3) == bytes(body["output_ids"]).decode()
    meta = body["meta_info"]
    assert meta["id"] == "one" and meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 3, 3)
    assert "index" not in body and "output_token_logprobs" not in meta
    assert (
        api.call("PUT", "/generate", json={"text": "abc"}).json()["meta_info"]["completion_tokens"]
        == 128
    )


def test_streams_are_cumulative():
    events = Api().events("/generate", text="abc", sampling_params=params())
    assert [event["text"] for event in events] == [expected(ABC_IDS, i) for i in (1, 2, 3)]
    assert [len(event["output_ids"]) for event in events] == [1, 2, 3]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True, True, False]


def test_a_batch_is_a_list_in_order_and_its_stream_chunks_have_an_index():
    api = Api()
    texts, ids = ["abc", "q"], [ABC_IDS, [BOS, ord("q")]]
    body = api.ok("/generate", text=texts, sampling_params=params(n=2), rid="r")
    assert [one["text"] for one in body] == [expected(i, 3, s) for i in ids for s in range(2)]
    assert [request.rid for request in api.engine.requests] == ["r_0", "r_1"]
    last = {}
    for event in api.events("/generate", text=texts, sampling_params=params(n=2)):
        last[event["index"]] = event["text"]
    assert [last[i] for i in range(4)] == [one["text"] for one in body]


def test_n_of_one_prompt_is_a_list_too():
    body = Api().ok("/generate", input_ids=[97], sampling_params=params(n=3))
    assert [one["text"] for one in body] == [expected([97], 3, s) for s in range(3)]


def test_per_prompt_lists_are_applied_one_by_one():
    api = Api()
    body = api.ok(
        "/generate",
        input_ids=[[97], [98]],
        sampling_params=[params(max_new_tokens=1), params(max_new_tokens=2)],
        return_logprob=[False, True],
        top_logprobs_num=[0, 2],
        extra_key=["x", None],
        cache_salt="s",
    )
    assert [len(one["output_ids"]) for one in body] == [1, 2]
    assert "output_token_logprobs" not in body[0]["meta_info"]
    assert len(body[1]["meta_info"]["output_top_logprobs"][0]) == 2
    first, second = api.engine.requests
    assert (first.extra_key, second.extra_key, second.cache_salt) == ("x", None, "s")


def test_logprobs_are_tuples_and_the_first_prompt_token_has_none():
    body = Api().ok(
        "/generate",
        text="abc",
        sampling_params=params(max_new_tokens=1),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[65, 66],
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    )
    meta = body["meta_info"]
    token = ord(expected(ABC_IDS, 1))
    assert meta["input_token_logprobs"][0] == [None, BOS, "<256>"]
    assert meta["input_token_logprobs"][1] == [logprob(97), 97, "a"]
    assert meta["output_token_logprobs"] == [[logprob(token), token, chr(token)]]
    assert meta["output_token_logprobs_length"] == 1
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_top_logprobs"][0][0] == [logprob(token), token, chr(token)]
    assert meta["output_token_ids_logprobs"] == [[[logprob(t), t, chr(t)] for t in (65, 66)]]
    assert body["prompt_token_ids"] == ABC_IDS


def test_scoring_without_a_start_scores_the_whole_prompt():
    body = Api().ok(
        "/generate", text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True
    )
    assert [entry[1] for entry in body["meta_info"]["input_token_logprobs"]] == ABC_IDS
    assert body["meta_info"]["output_token_logprobs"] == [] and body["text"] == ""


def test_null_max_new_tokens_means_up_to_the_context_and_other_nulls_the_default():
    api = Api()
    body = api.ok("/generate", text="abc", sampling_params={"max_new_tokens": None, "top_p": None})
    assert body["meta_info"]["completion_tokens"] == CONTEXT - 4
    assert api.engine.requests[-1].sampling.top_p == 1.0


def test_an_abort_ends_a_request_by_the_start_of_its_id():
    api = Api()

    async def both():
        import httpx

        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            body = {"text": None, "input_ids": list(b"hang"), "rid": "job-1"}
            running = asyncio.create_task(client.post("/generate", json=body))
            while not api.engine.open:
                await asyncio.sleep(0.001)
            aborted = await client.post("/abort_request", json={"rid": "job"})
            return aborted, await running

    aborted, answer = asyncio.run(both())
    assert aborted.status_code == 200 and api.engine.aborts == [("job", False)]
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


PROBES = ("/health", "/ready", "/health_generate")


@pytest.mark.parametrize("path", PROBES)
def test_health_runs_a_request_of_one_token_and_follows_the_engine(path):
    api = Api()
    assert api.call("GET", "/").status_code == 200 and not api.engine.requests
    assert api.call("GET", path).status_code == 200
    assert [(r.sampling.max_new_tokens, r.log_metrics) for r in api.engine.requests] == [(1, False)]
    api.engine.queue_full = True
    assert api.call("GET", path).status_code == 200  # busy is not dead
    api.engine.healthy = False
    assert api.call("GET", path).status_code == 503


def test_among_other_requests_health_asks_the_loop_and_health_generate_for_a_token():
    api = Api()

    async def probe():
        async with client_of(api) as client:
            hanging = asyncio.create_task(client.post("/generate", json={"text": "hang"}))
            while not api.engine.open:
                await asyncio.sleep(0.001)
            answers = [(await client.get(path)).status_code for path in PROBES]
            api.engine.abort(abort_all=True)
            await hanging
            return answers

    assert asyncio.run(probe()) == [200] * 3
    assert len(api.engine.controls) == 3 and len(api.engine.requests) == 2


@pytest.mark.parametrize("path", PROBES)
def test_an_engine_that_lives_and_answers_nothing_is_not_healthy(path, monkeypatch):
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    api = Api()
    api.engine.hangs = True
    assert api.call("GET", path).status_code == 503
    assert api.engine.controls == [("server_info", {})]
    api.engine.hangs = False
    assert api.call("GET", path).status_code == 200


def test_facts_hold_what_clients_read():
    api = Api(api_key="secret", page_size=8)
    key = {"Authorization": "Bearer secret"}
    for path in ("/model_info", "/get_model_info"):
        info = api.call("GET", path, headers=key).json()
        assert info["model_path"] == "fake/model" and info["is_generation"] is True
        assert info["architectures"] == ["FakeForCausalLM"]
    for path in ("/server_info", "/get_server_info"):
        response = api.call("GET", path, headers=key)
        info = response.json()
        assert info["disable_radix_cache"] is False and "page_size" in info
        assert info["internal_states"][0]["token_usage"] == 0.25
        assert info["max_total_num_tokens"] == 4096 and "version" in info
        assert "secret" not in response.text


def test_flush_cache_is_refused_while_busy_and_can_wait():
    api = Api()
    for method in ("GET", "POST"):
        assert api.call(method, "/flush_cache").status_code == 200
    api.engine.busy = True
    assert api.call("POST", "/flush_cache").status_code == 400

    async def free():
        async with client_of(api) as client:
            waiting = asyncio.create_task(client.post("/flush_cache?timeout=10"))
            await asyncio.sleep(0.05)
            api.engine.busy = False
            return await waiting

    assert asyncio.run(free()).status_code == 200


def test_a_flush_ends_when_its_client_leaves():
    api = Api()
    api.engine.busy = True

    async def leave():
        left, body = asyncio.Event(), [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/flush_cache", "headers": []}
        scope["query_string"] = b"timeout=60"
        task = asyncio.create_task(api.app(scope, receive, send))
        while len(api.engine.controls) < 2:
            await asyncio.sleep(0.01)
        assert not task.done()
        left.set()
        await asyncio.wait_for(task, 5)

    asyncio.run(leave())


def test_a_flush_waits_for_an_hour_at_most():
    api = Api()
    api.engine.busy = True
    for timeout in ("3601", "1e9", "inf", "-1", "9" * 5000):
        response = api.call("POST", f"/flush_cache?timeout={timeout}")
        assert response.status_code == 400 and "timeout must be seconds" in response.text
    assert not api.engine.controls


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_are_inverse(prefix):
    api = Api()
    body = api.ok(f"{prefix}/tokenize", prompt="abc")
    assert body == {"tokens": ABC_IDS, "count": 4, "max_model_len": CONTEXT}
    assert api.ok(f"{prefix}/detokenize", tokens=body["tokens"]) == {"text": "abc"}
    body = api.ok(f"{prefix}/tokenize", prompt=["a", "bc"], add_special_tokens=False)
    assert (body["tokens"], body["count"]) == ([[97], [98, 99]], [1, 2])
    texts = api.ok(f"{prefix}/detokenize", tokens=[[97], [BOS]], skip_special_tokens=False)
    assert texts == {"text": ["a", "<256>"]}
    chat = api.ok(f"{prefix}/tokenize", messages=[{"role": "user", "content": "x"}])
    assert chat["tokens"] == list(b"user:x\nassistant:")
    hello = [{"role": "user", "content": "x"}]
    closed = api.ok(f"{prefix}/tokenize", messages=hello, add_generation_prompt=False)
    assert closed["tokens"] == list(b"user:x\n")


def test_metrics_are_there_only_when_asked_for():
    assert Api().call("GET", "/metrics").status_code == 404
    response = Api(enable_metrics=True).call("GET", "/metrics")
    assert response.status_code == 200 and "# HELP" in response.text


def test_logprobs_of_the_tokens_drawn_may_be_asked_for_by_name():
    api = Api()
    asked = {"text": "abc", "sampling_params": {"max_new_tokens": 1}}
    api.ok("/generate", **asked, sampling_logprobs_mode="selected")
    response = api.post("/generate", **asked, sampling_logprobs_mode="support")
    assert response.status_code == 400 and "sampling_logprobs_mode" in response.text
