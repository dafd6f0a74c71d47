"""The real engine, its process and its HTTP API under traffic that is cancelled, invalid and too
much for the KV pool: answers stay right, everything is given back, memory stays flat."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from soak_traffic import (
    CONTEXT,
    SHAPE,
    Call,
    Reply,
    check_fates,
    check_greedy,
    equals_solo,
    growing_calls,
    make_calls,
    send,
    wait_idle,
)

from jserve.config import Config
from jserve.engine.engine import Engine
from jserve.server.app import create_app
from tests.server_process import serving_process

NUM_REQUESTS = 200
MOST_WAVES = 4
MINUTES = float(os.environ.get("JSERVE_SOAK_MINUTES", "30"))  # of the long soak
RATE = 20_000 / 1800  # its requests a second
FLAGS = {
    "load_format": "dummy",
    "tokenizer_path": "smollm2-135m",
    "max_running_requests": 16,
    "chunked_prefill_size": 48,
    "context_length": CONTEXT,
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.05,  # admit more than will fit
    "enable_priority_scheduling": True,
    "enable_metrics": True,
}


@contextlib.asynccontextmanager
async def api_here(engine: Engine, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP API of `engine` on a port, in this process and its event loop."""
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_level="error"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    serve = asyncio.create_task(server._serve([listener]))  # serve() would take the signals
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    while not server.started:
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        while (await client.get("/server_info")).json()["internal_states"][0]["programs_pending"]:
            await asyncio.sleep(0.2)
        yield client
    server.should_exit = True
    await serve


async def traffic(client: httpx.AsyncClient, seed: int) -> list[Reply]:
    """All requests at once; meanwhile somebody looks at the metrics."""
    rng = random.Random(seed)
    calls = growing_calls(rng, 14)
    calls += make_calls(rng, NUM_REQUESTS - len(calls), longest=4.0)
    replies = asyncio.gather(*(send(client, call) for call in calls))
    while not replies.done():
        assert (await client.get("/metrics")).status_code == 200
        await asyncio.wait((replies,), timeout=0.5)
    return replies.result()


@pytest.mark.timeout(600)
def test_200_streams_cancelled_invalid_and_short_of_pages_end_right_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    config = Config.from_flags(
        model_path=str(path), log_level="error", recompile_guard="error", **FLAGS
    )
    with Engine.from_config(config) as engine:
        asyncio.run(_soak(engine, config))


async def _soak(engine: Engine, config: Config) -> None:
    async with api_here(engine, config) as client:
        await send(
            client, Call({"input_ids": [9], "stream": True, "sampling_params": {}}, "finish")
        )
        before = _held(engine)
        for seed in range(3, 3 + MOST_WAVES):  # who is retracted is a matter of timing
            wave = await traffic(client, seed)
            info = await wait_idle(client)
            finished = check_fates(wave)
            cancelled = [r for r in wave if r.left or _aborted(r)]
            assert len(wave) == NUM_REQUESTS and len(finished) >= NUM_REQUESTS // 2
            assert len(cancelled) > 15, len(cancelled)
            if any(r.answer["meta_info"]["num_retractions"] for r in finished):
                break
        assert info["num_aborted_requests_total"] > 15
        assert info["num_retracted_requests_total"] > 0 and info["evicted_tokens_total"] > 0
        assert info["cached_tokens_total"] > 0 and info["num_chunked_requests_total"] > 0
        assert any(r.answer["meta_info"]["num_retractions"] for r in finished)
        _all_given_back(info)
        greedy = [r for r in finished if r.call.sampling["temperature"] == 0]
        sampled = [r for r in finished if r.call.sampling["temperature"] > 0]
        for reply in greedy:
            await check_greedy(client, reply)
        alone = [*sampled[:12], *greedy[:12]]
        same = [await equals_solo(client, reply) for reply in alone]
        assert sum(same) >= len(same) - 1, same  # float32 rounding may flip a near tie
        _all_given_back(await wait_idle(client))
        await asyncio.sleep(0.2)
        gc.collect()
        after = _held(engine)
        assert after["routes"] == 0 and after["questions"] == 0
        assert after["tasks"] <= before["tasks"], asyncio.all_tasks()
        assert after["fds"] <= before["fds"], (before, after)
        assert after["threads"] <= before["threads"] + 1, threading.enumerate()
        assert len(greedy) > 60 and len(sampled) > 10


def _aborted(reply: Reply) -> bool:
    return reply.status == 200 and reply.finish["type"] == "abort"


def _held(engine: Engine) -> dict[str, int]:
    """What this process holds for requests."""
    client: Any = engine._client
    return {
        "routes": len(client.routes) + len(client.left),
        "questions": len(client._questions._open),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "fds": psutil.Process().num_fds(),
    }


def _all_given_back(info: dict[str, Any]) -> None:
    free, cached = info["kv_available_tokens"], info["kv_evictable_tokens"]
    assert free + cached == info["max_total_num_tokens"], info
    assert info["num_running_reqs"] == info["num_queue_reqs"] == 0, info
    assert info["kv_protected_tokens"] == 0 and info["recompiles_total"] == 0, info


# ---- memory over time ----


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What one process holds at a time; seconds, bytes."""

    time: float
    rss: int
    fds: int
    threads: int

    @classmethod
    def of(cls, pid: int, time: float) -> Sample:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(time, process.memory_info().rss, process.num_fds(), process.num_threads())


@pytest.mark.full
@pytest.mark.timeout(MINUTES * 120 + 600)
def test_memory_stays_flat_over_half_an_hour_of_such_traffic(tmp_path: Path) -> None:
    """JSERVE_SOAK_MINUTES makes it shorter; one line of figures goes to standard output."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    flags = {"model_path": path, "log_level": "warning", **FLAGS}
    arguments = [
        part
        for name, value in flags.items()
        for part in (f"--{name.replace('_', '-')}", str(value))[: 1 if value is True else 2]
    ]
    with serving_process(*arguments) as (client, process):
        engines = [
            child.pid
            for child in psutil.Process(process.pid).children()
            if any("spawn_main" in part for part in child.cmdline())
        ]
        assert len(engines) == 1, engines
        pids = {"api": process.pid, "engine": engines[0]}
        samples = asyncio.run(_long_soak(str(client.base_url), pids))
    for name, of_one in samples.items():
        _assert_flat(name, of_one)


async def _long_soak(url: str, pids: dict[str, int]) -> dict[str, list[Sample]]:
    """Requests at RATE for MINUTES; → samples of each process, every 5 seconds."""
    rng, count = random.Random(4), int(MINUTES * 60 * RATE)
    calls = make_calls(rng, count, longest=0.2, outputs=(1, 4, 8, 16, 40))
    started, gate = time.monotonic(), asyncio.Semaphore(100)  # a slow machine takes longer
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    to_check: list[Reply] = []
    num_finished = 0

    async def one(client: httpx.AsyncClient, call: Call, keep: bool) -> None:
        nonlocal num_finished
        async with gate:
            reply = await send(client, dataclasses.replace(call, start=0.0))
        finished = check_fates([reply])
        num_finished += len(finished)
        if keep and finished and call.sampling["temperature"] == 0:
            to_check.append(reply)

    async def sample() -> None:
        while True:
            now = time.monotonic() - started
            for name, pid in pids.items():
                samples[name].append(Sample.of(pid, now))
            await asyncio.sleep(5.0)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        sampling = asyncio.create_task(sample())
        open_: set[asyncio.Task[None]] = set()
        for index, call in enumerate(calls):
            await asyncio.sleep(max(0.0, started + index / RATE - time.monotonic()))
            await gate.acquire()
            gate.release()
            open_ = {task for task in open_ if not task.done() or task.result()}
            open_.add(asyncio.create_task(one(client, call, index % 200 == 0)))
            if index % 100 == 0:
                assert (await client.get("/metrics")).status_code == 200
        await asyncio.gather(*open_)
        took = time.monotonic() - started
        sampling.cancel()
        info = await wait_idle(client)
        for reply in to_check:
            await check_greedy(client, reply)
    print(json.dumps({"requests": count, "finished": num_finished, "seconds": round(took)}))
    assert num_finished > count // 2 and len(to_check) > 0
    assert info["num_aborted_requests_total"] > 0 and info["evicted_tokens_total"] > 0
    _all_given_back(info)
    return samples


def _assert_flat(name: str, samples: list[Sample]) -> None:
    """The last minute against the one after the warm-up of five, or of a third of the time."""
    end = samples[-1].time
    warm = min(300.0, end / 3)
    base = [s for s in samples if warm <= s.time < warm + 60]
    last = [s for s in samples if s.time > end - 60]
    rss = [statistics.median(s.rss for s in part) for part in (base, last)]
    mib = [
        round(statistics.median(s.rss for s in samples[i : i + 6]) / 2**20, 1)
        for i in range(0, len(samples), 6)
    ]
    print(json.dumps({"process": name, "rss_mib_every_30_s": mib, "growth": rss[1] / rss[0] - 1}))
    assert rss[1] <= 1.02 * rss[0], (name, mib)
    for field in ("fds", "threads"):
        before, after = ([getattr(s, field) for s in part] for part in (base, last))
        # connections and worker threads come and go with the traffic
        assert statistics.median(after) <= 1.1 * max(before) + 1, (name, field, before, after)
