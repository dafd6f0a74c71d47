"""A rank that lives and does not answer: what is asked of all is answered without it, by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from test_engine import start
from test_ranks import ask, fronted, wait_until
from test_ranks_flush import replies

from jserve.engine import ranks
from jserve.engine.engine import Engine
from jserve.errors import TimedOutError
from jserve.server.app import create_app
from jserve.types import Control, ControlReply, Gauges, SamplingParams, Submit

PATIENCE = 1.0  # so that a busy machine makes no rank deaf
SHORT = 0.05  # where the test plays the ranks


async def call(engine: Engine, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(engine, engine.config))
    async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
        return await client.request(method, path, **options)


def asked(engine: Engine, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    return asyncio.run(asyncio.wait_for(call(engine, method, path, **options), 8))


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ANSWER_TIMEOUT", PATIENCE)
        engine = start(dp_size=2, inline=False, enable_metrics=True)
    with engine:
        yield engine


@pytest.fixture
def half_deaf(two: Engine) -> Iterator[tuple[Engine, int]]:
    """Two ranks of which number 1 is stopped, and the id of its process."""
    for i in range(4):
        ask(two, f"{i} before")
    assert two.get_server_info()["deaf_dp_ranks"] == []
    pid = int(two.rank_facts[1]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield two, pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_rank_holds_up_no_route_that_asks_all_and_is_named(half_deaf: Any) -> None:
    engine, pid = half_deaf
    started = time.monotonic()
    reply = asked(engine, "/server_info")
    assert PATIENCE <= time.monotonic() - started < 5
    info = reply.json()
    assert reply.status_code == 200 and info["deaf_dp_ranks"] == [1]
    assert [state["dp_rank"] for state in info["internal_states"]] == [0]
    started = time.monotonic()  # from now on nobody waits for it
    assert engine.get_server_info()["deaf_dp_ranks"] == [1]
    assert [one["dp_rank"] for one in asked(engine, "/v1/loads").json()["loads"]] == [0]
    assert [one["dp_rank"] for one in asked(engine, "/get_load").json()] == [0]
    assert re.search(r"num_dp_ranks\{.*\} 1\.0", asked(engine, "/metrics").text)
    for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
        reply = asked(engine, path, "POST")
        assert reply.status_code == 503 and "data-parallel rank 1 within" in reply.text, path
    for method in (engine.flush_cache, engine.pause_generation, engine.continue_generation):
        with pytest.raises(TimedOutError, match="no answer of data-parallel rank 1"):
            method()
    assert asked(engine, "/abort_request", "POST", json={"abort_all": True}).status_code == 200
    assert asked(engine, "/health").status_code == 200
    assert asked(engine, "/health_generate").status_code == 200
    for i in range(4):
        assert ask(engine, f"{i} meanwhile")["meta_info"]["dp_rank"] == 0
    assert time.monotonic() - started < PATIENCE * 8, "of 14 questions none has waited"

    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: len(engine.ranks) == 2)
    info = asked(engine, "/server_info").json()
    assert info["deaf_dp_ranks"] == [] and len(info["internal_states"]) == 2
    assert info["internal_states"][1]["paused"] is False, "it was told of pause and end, in order"
    assert engine.flush_cache(timeout=5)
    assert {ask(engine, f"{i} after")["meta_info"]["dp_rank"] for i in range(4)} == {0, 1}


def test_a_flush_waits_for_a_rank_that_answers_in_its_time(half_deaf: Any) -> None:
    engine, pid = half_deaf

    async def run() -> httpx.Response:
        flush = asyncio.create_task(call(engine, "POST", "/flush_cache?timeout=5"))
        await asyncio.sleep(PATIENCE + 1.0)
        assert not flush.done() and engine.gauges["num_dp_ranks"] == 1
        os.kill(pid, signal.SIGCONT)
        return await asyncio.wait_for(flush, 5)

    assert asyncio.run(run()).status_code == 200


@pytest.fixture
def one_deaf(monkeypatch: pytest.MonkeyPatch) -> tuple[ranks.Front, list[Any]]:
    """Three ranks of which number 1 has not answered, and their ends."""
    monkeypatch.setattr(ranks, "ANSWER_TIMEOUT", SHORT)
    front, ends = fronted(3)
    front.send(Control(id="1", op="pause_generation"))
    for rank in (0, 2):
        front.receive(rank, [ControlReply(id="1", ok=True)])
    front.expire()
    assert not replies(front), "its time is not over"
    time.sleep(SHORT)
    front.expire()
    (reply,) = replies(front)
    assert not reply.ok and reply.deaf == [1] and "rank 1 within 0.05 s" in reply.message
    return front, ends


def test_a_deaf_rank_is_told_all_and_not_waited_for_until_it_is_heard(one_deaf: Any) -> None:
    front, ends = one_deaf
    front.send(Control(id="2", op="continue_generation"))
    front.receive(0, [ControlReply(id="2", ok=True)])
    assert not replies(front)
    front.receive(2, [ControlReply(id="2", ok=True)])
    assert [one.deaf for one in replies(front)] == [[1]]
    assert [one.op for one in ends[1].drain()] == ["pause_generation", "continue_generation"]
    front.receive(1, [ControlReply(id="1", ok=True), ControlReply(id="2", ok=True)])
    assert not replies(front), "both were answered long ago"
    front.send(Control(id="3", op="continue_generation"))
    for rank in range(3):
        assert not replies(front)
        front.receive(rank, [ControlReply(id="3", ok=True)])
    assert [(one.ok, one.deaf) for one in replies(front)] == [(True, [])]


def test_a_refusal_counts_more_than_silence(one_deaf: Any) -> None:
    front, _ = one_deaf
    front.send(Control(id="2", op="flush_cache"))
    front.receive(0, [ControlReply(id="2", ok=True)])
    front.receive(2, [ControlReply(id="2", ok=False, message="busy")])
    assert [(one.ok, one.message, one.deaf) for one in replies(front)] == [(False, "busy", [])]


def test_no_rank_is_flushed_when_one_is_deaf(one_deaf: Any) -> None:
    front, ends = one_deaf
    front.send(Control(id="2", op="flush_cache"))
    for rank in (0, 2):
        front.receive(rank, [ControlReply(id="2", ok=True)])
    assert [(one.ok, one.deaf) for one in replies(front)] == [(False, [1])]
    assert all("flush_cache" not in [one.op for one in end.drain()] for end in ends)


def test_a_deaf_rank_that_is_lost_is_missed_by_nobody(one_deaf: Any) -> None:
    front, _ = one_deaf
    front.send(Control(id="2", op="server_info"))
    front.lose(1, "killed")
    for rank in (0, 2):
        front.receive(rank, [ControlReply(id="2", ok=True, payload={"paused": False})])
    (reply,) = replies(front)
    assert reply.ok and reply.deaf == [] and reply.payload["deaf_dp_ranks"] == []


def test_requests_go_to_deaf_ranks_when_named_or_when_all_are(one_deaf: Any) -> None:
    front, ends = one_deaf

    def placed(rid: str, rank: int | None = None) -> int:
        for end in ends:
            end.drain()
        submit = Submit(rid=rid, prompt_ids=[1], sampling=SamplingParams(), routed_dp_rank=rank)
        front.send(submit)
        (at,) = [i for i, end in enumerate(ends) if end.drain()]
        return at

    assert {placed(f"r{i}") for i in range(6)} == {0, 2}
    assert placed("named", 1) == 1
    front.receive(1, [Gauges(values={})])
    assert placed("idlest") == 1
    front.send(Control(id="3", op="server_info"))
    time.sleep(SHORT)
    front.expire()
    (reply,) = replies(front)
    assert not reply.ok and reply.deaf == [0, 1, 2]
    assert {placed(f"s{i}") for i in range(9)} == {0, 1, 2}


def test_ranks_of_which_all_are_deaf_are_not_healthy(half_deaf: Any) -> None:
    engine, _ = half_deaf
    pid = int(engine.rank_facts[0]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        assert asked(engine, "/health").status_code == 503
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, int]]:
    """One engine alone, whose process is stopped, and that one's id."""
    monkeypatch.setattr(ranks, "ANSWER_TIMEOUT", 0.3)
    with start(inline=False) as engine:
        pid = int(engine.server_info["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            yield engine, pid
        finally:
            os.kill(pid, signal.SIGCONT)


def test_one_engine_that_is_stopped_holds_up_nobody_who_asks(stopped: Any) -> None:
    engine, pid = stopped
    with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as ends:
        ends.callback(os.kill, pid, signal.SIGCONT)
        open_before = threads.submit(engine.generate, "before", {"max_new_tokens": 4})
        for path in ("/server_info", "/flush_cache", "/pause_generation", "/continue_generation"):
            reply = asked(engine, path, "GET" if path == "/server_info" else "POST")
            assert reply.status_code == 503, path
            assert "no answer of the engine within 0.3 s" in reply.text, path
        assert asked(engine, "/health").status_code == 503
        assert asked(engine, "/abort_request", "POST", json={"rid": "nobody"}).status_code == 200
        for method in (
            *(engine.flush_cache, engine.pause_generation),
            *(engine.continue_generation, engine.get_server_info),
        ):
            with pytest.raises(TimedOutError, match=r": no answer of the engine within 0\.3 s"):
                method()
        assert engine.healthy and not open_before.done()

        os.kill(pid, signal.SIGCONT)
        body = open_before.result(10)
        assert body["meta_info"]["finish_reason"]["type"] == "abort", "as the pauses asked"
    wait_until(lambda: not engine.get_server_info()["paused"])
    assert asked(engine, "/health").status_code == 200
    assert engine.flush_cache(timeout=5)
    assert ask(engine, "after")["meta_info"]["finish_reason"]["type"] == "length"


def test_a_flush_waits_for_one_engine_that_answers_in_its_time(stopped: Any) -> None:
    engine, pid = stopped
    with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as ends:
        ends.callback(os.kill, pid, signal.SIGCONT)
        flush = threads.submit(engine.flush_cache, 8.0)
        time.sleep(0.8)
        assert not flush.done()
        os.kill(pid, signal.SIGCONT)
        assert flush.result(8)


STEP = """
import time
from jserve.engine.watchdog import Watchdog
begun, ended = time.monotonic(), []
dog = Watchdog(0.8, lambda: None if ended else begun, lambda: print("hangs", flush=True))
print("in a step", flush=True)
for _ in range(5):
    time.sleep(0.02)
ended.append(True)
time.sleep(0.4)
print("over", flush=True)
"""


def test_a_step_amid_which_the_process_was_stopped_has_not_taken_that_long() -> None:
    """test_loop.py has one that has."""
    command = [sys.executable, "-c", STEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "in a step" in process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().split() == ["over"]
