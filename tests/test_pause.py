"""Pauses from outside: the loop that drains first, the Python API, and HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import ByteTokenizer, continuation, make_scheduler
from fake_server_engine import Api
from test_loop import Rig

from jserve.engine.engine import Engine
from jserve.errors import RequestError, TimedOutError
from jserve.server.app import create_app
from jserve.types import Control, ControlReply


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.02)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer: Any = ByteTokenizer()
    build = "fake_engine:build"
    with Engine(model_path="fake", inline=True, builder=build, tokenizer=tokenizer) as engine:
        yield engine


def text_of(prompt: str, count: int) -> str:
    return bytes(continuation(list(prompt.encode()), count)).decode()


# ---- the loop ----


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_loop_takes_in_what_is_in_flight_before_it_pauses(mode: str, depth: int) -> None:
    rig = Rig(depth)
    rig.submit("a", [1] * 20, 30)
    rig.tick(6)
    launched = [step for name, step in rig.runner.events if name == "launch"]
    rig.api.send(Control(id="p", op="pause_generation", args={"mode": mode}))
    rig.tick(3)
    events = rig.runner.events
    assert [step for name, step in events if name == "read"] == launched
    assert [step for name, step in events if name == "launch"] == launched
    got = rig.tokens("a")
    assert got == continuation([1] * 20, 30)[: len(got)] and len(got) == len(launched)
    if mode == "abort":
        assert rig.finish("a").type == "abort"
        assert rig.scheduler.idle and not rig.scheduler.has_work
        return
    rig.api.send(Control(id="f", op="flush_cache"))
    rig.api.send(Control(id="c", op="continue_generation"))
    rig.run_until_finished("a")
    assert rig.tokens("a") == continuation([1] * 20, 30)
    replies = {m.id: m.ok for m in rig.other if isinstance(m, ControlReply)}
    assert replies == {"p": True, "f": mode == "retract", "c": True}


@pytest.mark.parametrize("how", ["retract", "reset"])
def test_who_filled_the_whole_pool_ends_when_it_is_taken_off_and_the_others_go_on(how: str) -> None:
    """Its last token, which needs no KV while it stays, would need a page when it comes back."""
    rig = Rig(0, scheduler=make_scheduler(0, num_pages=9))  # of 4 tokens; one is no page
    rig.submit("a", [1] * 20, 30)
    rig.tick()
    while 20 + len(rig.tokens("a")) <= 32:
        rig.tick()
    rig.submit("b", [2] * 4, 5)
    if how == "retract":
        rig.api.send(Control(id="p", op="pause_generation", args={"mode": "retract"}))
        rig.api.send(Control(id="c", op="continue_generation"))
    else:
        rig.runner.fail = {("launch", len(rig.tokens("a")) + 1)}
    rig.run_until_finished("a", "b")
    assert rig.finish("a").message == "The KV cache is out of memory for the last request."
    assert rig.tokens("a") == continuation([1] * 20, 30)[: len(rig.tokens("a"))]
    assert rig.tokens("b") == continuation([2] * 4, 5)
    assert (("reset", -1) in rig.runner.events) == (how == "reset")


def test_a_paused_loop_rests_until_a_message_comes_and_tells_its_gauges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.2)
    rig = Rig()
    rig.submit("a", [1] * 20, 30)
    rig.tick(3)
    rig.api.send(Control(id="p", op="pause_generation", args={"mode": "in_place"}))
    started = time.monotonic()
    rig.tick(2)
    assert time.monotonic() - started >= 0.3
    gauges = [message for message in rig.other if hasattr(message, "values")]
    assert gauges[-1].values["num_paused_reqs"] == gauges[-1].values["num_running_reqs"] == 1


def test_an_unknown_mode_is_answered_and_nothing_stops() -> None:
    rig = Rig()
    rig.submit("a", [1] * 20, 8)
    rig.api.send(Control(id="p", op="pause_generation", args={"mode": "softly"}))
    rig.run_until_finished("a")
    (reply,) = [m for m in rig.other if isinstance(m, ControlReply)]
    assert not reply.ok and "softly" in reply.message and "in_place" in reply.message
    assert rig.runner.events.count(("reset", -1)) == 0


# ---- the Python API ----


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_generate_waits_for_the_end_of_a_pause_and_answers_in_full(
    engine: Engine, mode: str
) -> None:
    params = {"temperature": 0, "max_new_tokens": 300}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        before = pool.submit(engine.generate, "before", params)
        while not engine.get_server_info()["num_running_reqs"]:
            time.sleep(0.002)
        engine.pause_generation(mode)
        state = engine.get_server_info()
        assert state["paused"] and state["num_paused_reqs"] == 1
        after = pool.submit(engine.generate, "after", params)
        time.sleep(0.1)
        steps = engine.get_server_info()["steps_total"]
        time.sleep(0.05)
        assert engine.get_server_info()["steps_total"] == steps
        assert not before.done() and not after.done()
        assert engine.flush_cache() == (mode == "retract")
        engine.continue_generation()
        assert before.result(20)["text"] == text_of("before", 300)
        assert after.result(20)["text"] == text_of("after", 300)
    assert not engine.get_server_info()["paused"]


def test_a_pause_with_abort_ends_what_runs_and_returns_when_it_is_over(engine: Engine) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        before = pool.submit(engine.generate, "before", {"max_new_tokens": 400})
        while not engine.get_server_info()["num_running_reqs"]:
            time.sleep(0.002)
        engine.pause_generation()
        assert engine.get_server_info()["num_running_reqs"] == 0
        assert before.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
        engine.continue_generation()
    assert engine.generate("x", {"temperature": 0, "max_new_tokens": 3})["text"] == text_of("x", 3)


def test_the_python_api_names_the_modes_when_given_another(engine: Engine) -> None:
    with pytest.raises(RequestError, match="in_place") as caught:
        engine.pause_generation("softly")
    assert caught.value.param == "mode"


def test_priorities_are_typed_and_broadcast(engine: Engine) -> None:
    bodies = engine.generate(["a", "b"], {"max_new_tokens": 1}, priority=[1, None])
    assert len(bodies) == 2
    for wrong in ("high", 1.5, True, 1 << 70, [1]):
        with pytest.raises(RequestError) as caught:
            engine.generate(["a", "b"], {"max_new_tokens": 1}, priority=wrong)
        assert caught.value.param == "priority", wrong


def test_timeouts_reach_the_caller_as_errors_of_status_503() -> None:
    tokenizer: Any = ByteTokenizer()
    build = "fake_engine:build_impatient"
    with Engine(model_path="fake", inline=True, builder=build, tokenizer=tokenizer) as engine:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [pool.submit(engine.generate, text, {"max_new_tokens": 450}) for text in "ab"]
            errors = [job.exception(10) for job in jobs]
        assert all(isinstance(error, TimedOutError) for error in errors), errors
        words = sorted(str(error) for error in errors)
        assert "--req-running-timeout" in words[0] and "--req-waiting-timeout" in words[1]

        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(engine, engine.config))
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                body = {"text": "a", "sampling_params": {"max_new_tokens": 450}}
                return await client.post("/generate", json=body)

        response = asyncio.run(post())
        assert response.status_code == 503 and "ran for longer than 0.1 s" in response.text
        short = engine.generate("x", {"temperature": 0, "max_new_tokens": 3})
        assert short["text"] == text_of("x", 3)
        numbers = engine.get_server_info()
        assert numbers["num_running_timeouts_total"] == 2
        assert numbers["num_waiting_timeouts_total"] == 1


# ---- HTTP ----


def test_the_routes_ask_the_engine_and_bodies_may_be_empty() -> None:
    api = Api()
    assert api.call("POST", "/pause_generation").json()["status"] == "ok"
    for mode in ("retract", "in_place"):
        assert api.ok("/pause_generation", mode=mode)["status"] == "ok"
    assert api.ok("/continue_generation", torch_empty_cache=False)["status"] == "ok"
    assert api.call("POST", "/continue_generation").status_code == 200
    modes = [args for op, args in api.engine.controls if op == "pause_generation"]
    assert modes == [{"mode": "abort"}, {"mode": "retract"}, {"mode": "in_place"}]
    assert [op for op, _ in api.engine.controls].count("continue_generation") == 2


@pytest.mark.parametrize("body", [{"mode": "gently"}, {"mode": 3}, {"how": "abort"}])
def test_a_wrong_body_is_named(body: dict[str, Any]) -> None:
    api = Api()
    response = api.post("/pause_generation", **body)
    assert response.status_code == 400 and next(iter(body)) in response.text
    assert not api.engine.controls


def test_a_paused_engine_is_healthy_without_a_request() -> None:
    api = Api()
    api.engine.paused = True
    for path in ("/health", "/health_generate"):
        assert api.call("GET", path).status_code == 200
    assert not api.engine.requests
    api.engine.healthy = False
    assert api.call("GET", "/health_generate").status_code == 503


def test_the_priority_of_a_body_reaches_the_engine_and_wrong_types_are_named() -> None:
    api, text, chat = Api(), {"prompt": "a"}, {"messages": [{"role": "user", "content": "x"}]}
    api.ok("/v1/completions", **text, max_tokens=1, priority=3)
    api.ok("/v1/chat/completions", **chat, max_tokens=1, priority=-4)
    api.ok("/generate", text=["a", "b"], sampling_params={"max_new_tokens": 1}, priority=[5, None])
    assert [request.priority for request in api.engine.requests] == [3, -4, 5, None]
    for path, body in (
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
        ("/generate", {"text": "a"}),
    ):
        for wrong in ("high", 1.5, True, 1 << 64):
            response = api.post(path, **body, priority=wrong)
            assert response.status_code == 400 and "priority" in response.text, response.text
    assert len(api.engine.requests) == 4


def test_a_pause_over_http_holds_requests_until_it_ends(engine: Engine) -> None:
    async def go() -> tuple[Any, ...]:
        transport = httpx.ASGITransport(create_app(engine, engine.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            paused = await client.post("/pause_generation", json={"mode": "retract"})
            params = {"temperature": 0, "max_new_tokens": 4}
            body = {"text": "hi", "sampling_params": params}
            waiting = asyncio.create_task(client.post("/generate", json=body))
            await asyncio.sleep(0.1)
            health = await client.get("/health_generate")
            assert not waiting.done()
            continued = await client.post("/continue_generation", json={})
            return paused, health, continued, await waiting

    paused, health, continued, answer = asyncio.run(go())
    assert [r.status_code for r in (paused, health, continued, answer)] == [200] * 4
    assert answer.json()["text"] == text_of("hi", 4)
