"""Flushing: refused while there is work, patient on demand, through HTTP and Python."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import ByteTokenizer, ScriptedRunner, continuation, make_loop

from jserve.engine.engine import Engine
from jserve.engine.local import local_ends
from jserve.errors import RequestError
from jserve.server.app import create_app
from jserve.types import Control, ControlReply, Deltas, SamplingParams, Submit

PROMPT = list(range(100, 140))
PARAMS = {"max_new_tokens": 300, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.01)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer = ByteTokenizer()
    with Engine("fake", inline=True, builder="fake_engine:build", tokenizer=tokenizer) as engine:  # type: ignore[arg-type]
        yield engine


class Busy:
    """A request runs while this is entered, and is over when it is left."""

    def __init__(self, engine: Engine) -> None:
        self._stream = engine.generate(input_ids=PROMPT, sampling_params=PARAMS, stream=True)
        self.thread = threading.Thread(target=lambda: list(self._stream))

    def __enter__(self) -> threading.Thread:
        next(self._stream)
        self.thread.start()
        return self.thread

    def __exit__(self, *_: object) -> None:
        self.thread.join()


def cached_tokens(engine: Engine) -> int:
    params = PARAMS | {"max_new_tokens": 1}
    result = engine.generate(input_ids=PROMPT, sampling_params=params)
    return result["meta_info"]["cached_tokens"]


def test_flush_is_refused_while_busy_and_waits_if_told(engine: Engine) -> None:
    cached_tokens(engine)
    assert cached_tokens(engine) == 36  # ten pages of four, but not the last token
    with Busy(engine) as running:
        assert not engine.flush_cache()
        started = time.monotonic()
        assert not engine.flush_cache(timeout=0.05) and time.monotonic() - started >= 0.05
        assert running.is_alive()
        assert engine.flush_cache(timeout=30)
    assert cached_tokens(engine) == 0


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), None, "1", True, [1]])
def test_a_timeout_that_is_no_time_is_refused(engine: Engine, timeout: Any) -> None:
    with pytest.raises(RequestError, match="timeout"):
        engine.flush_cache(timeout=timeout)


def test_over_http_a_busy_engine_answers_400_or_is_waited_for(engine: Engine) -> None:
    async def post(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine, engine.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.post(path)

    with Busy(engine) as running:
        refused = asyncio.run(post("/flush_cache"))
        assert refused.status_code == 400 and "running or waiting" in refused.text
        assert asyncio.run(post("/flush_cache?timeout=0.05")).status_code == 400
        assert running.is_alive()
        assert asyncio.run(post("/flush_cache?timeout=30")).status_code == 200
    for bad in ("soon", "-1", "nan", "inf"):
        assert asyncio.run(post(f"/flush_cache?timeout={bad}")).status_code == 400
    assert asyncio.run(post("/flush_cache")).status_code == 200


def test_a_refused_flush_leaves_the_launches_in_flight_and_an_idle_one_takes_them_in() -> None:
    api, end = local_ends()
    runner = ScriptedRunner()
    loop = make_loop(end, runner)
    deltas: list[int] = []
    answers: dict[str, bool] = {}

    def tick() -> None:
        loop.tick()
        for message in api.drain():
            if isinstance(message, Deltas):
                for delta in message.items:
                    deltas.extend(delta.token_ids)
            elif isinstance(message, ControlReply):
                answers[message.id] = message.ok

    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    api.send(Submit(rid="a", prompt_ids=PROMPT, sampling=params, stream=True))
    tick()
    tick()
    runner.events.clear()
    api.send(Control(id="busy", op="flush_cache"))
    tick()
    assert [name for name, _ in runner.events] == ["launch", "read", "finish"]  # as ever
    while len(deltas) < 8:
        tick()
        api.send(Control(id=f"at{len(deltas)}", op="flush_cache"))
    tick()
    assert deltas == continuation(PROMPT, 8)
    assert not answers["busy"] and answers["at8"]


def test_in_a_pause_waiting_requests_do_not_count_and_their_answers_stay_right() -> None:
    api, end = local_ends()
    loop = make_loop(end, ScriptedRunner())
    tokens: list[int] = []
    replies: list[ControlReply] = []

    def tick(op: str = "", **arguments: str) -> None:
        if op:
            api.send(Control(id=op, op=op, args=dict(arguments)))
        loop.tick()
        for message in api.drain():
            if isinstance(message, Deltas):
                for delta in message.items:
                    tokens.extend(delta.token_ids)
            elif isinstance(message, ControlReply):
                replies.append(message)

    params = SamplingParams(max_new_tokens=40, temperature=0.0)
    api.send(Submit(rid="a", prompt_ids=PROMPT, sampling=params, stream=True))
    for _ in range(6):
        tick()
    scheduler = loop._scheduler
    tick("pause_generation", mode="in_place")
    tick("flush_cache")
    assert not replies[-1].ok  # it holds its pages
    tick("pause_generation", mode="retract")
    assert scheduler.stats()["kv_evictable_tokens"] > 0
    tick("flush_cache")
    assert replies[-1].ok and scheduler.stats()["kv_evictable_tokens"] == 0
    assert scheduler.has_work and 0 < len(tokens) < 40
    tick("continue_generation")
    while scheduler.has_work:
        tick()
    tick()
    assert tokens == continuation(PROMPT, 40)
