"""Several engines behind one front: who gets what, and what the end of one costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import continuation
from prometheus_client.parser import text_string_to_metric_families
from test_engine import collect, request, start

from jserve.config import Config
from jserve.engine import ranks
from jserve.engine.engine import Engine
from jserve.engine.local import local_ends
from jserve.engine.placement import Placement
from jserve.errors import EngineDeadError, RequestError, WeightError
from jserve.server.app import create_app
from jserve.types import Deltas, Progress, SamplingParams, Submit


def by_rank(engine: Engine, name: str) -> dict[int, float]:
    states = engine.get_server_info()["internal_states"]
    return {state["dp_rank"]: state[name] for state in states}


def ask(engine: Engine, prompt: str, tokens: int = 12, **options: Any) -> dict[str, Any]:
    body = engine.generate(prompt, {"temperature": 0, "max_new_tokens": tokens}, **options)
    assert body["output_ids"] == continuation(list(prompt.encode()), tokens)
    return body


def test_requests_are_dealt_out_and_each_answer_is_that_of_one_engine() -> None:
    with start(dp_size=3) as engine:
        for i in range(6):
            ask(engine, f"{i} is a number")
        assert by_rank(engine, "num_requests_total") == {0: 2, 1: 2, 2: 2}
        info = engine.get_server_info()
        assert info["num_requests_total"] == 6 and info["dp_size"] == 3
        assert info["page_size"] == 4 and info["paused"] is False


def test_a_conversation_stays_where_its_cache_is() -> None:
    with start(dp_size=2) as engine:
        prompt = "a first turn that is longer than a few pages of the cache"
        first = ask(engine, prompt, 20)
        second = ask(engine, prompt + first["text"] + " and then?", 8)
        assert second["meta_info"]["cached_tokens"] >= len(prompt) // 4 * 4
        requests = by_rank(engine, "num_requests_total")
        assert sorted(requests.values()) == [0, 2]
        assert by_rank(engine, "num_used_tokens").keys() == {0, 1}


def test_a_killed_rank_fails_its_own_requests_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(engine: Engine) -> tuple[list[Any], float]:
        tasks = [
            asyncio.create_task(collect(engine, request(f"{i} to go", max_new_tokens=400)))
            for i in range(4)
        ]
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in tasks)
        started = time.monotonic()
        os.kill(int(engine.rank_facts[1]["pid"]), signal.SIGKILL)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - started
        return await asyncio.gather(*tasks, return_exceptions=True), took

    with start(dp_size=2, inline=False) as engine:
        results, took = asyncio.run(run(engine))
        assert took < 1
        lost = [i for i, one in enumerate(results) if isinstance(one, BaseException)]
        assert lost == [1, 3]
        for i in lost:
            assert isinstance(results[i], EngineDeadError)
            assert "data-parallel rank 1 ended" in str(results[i])
            assert "exit code -9" in str(results[i])
        for i in (0, 2):
            expected = continuation(list(f"{i} to go".encode()), 400)
            assert results[i][-1].output_ids == expected
        (record,) = [r for r in caplog.records if "data-parallel" in r.getMessage()]
        assert record.levelname == "ERROR" and "exit code -9" in record.getMessage()
        assert engine.healthy and engine.gauges["num_dp_ranks"] == 1
        for i in range(4):
            ask(engine, f"{i} after that")
        assert by_rank(engine, "num_requests_total") == {0: 6}
        assert engine.flush_cache()
        whole, left = engine.server_info, asyncio.run(get(engine, "/server_info")).json()
        assert (left["max_running_requests"], whole["max_running_requests"]) == (16, 32)
        assert asyncio.run(get(engine, "/v1/loads")).json()["num_accelerators"] == 1
        named = asyncio.run(post(engine, "/generate", {"routed_dp_rank": 1}))
        assert named.status_code == 503 and "0 can be chosen" in named.text

        os.kill(int(engine.rank_facts[0]["pid"]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="data-parallel rank 0 ended"):
            for _ in range(100):
                ask(engine, "is anybody there?")
        assert not engine.healthy
        with pytest.raises(EngineDeadError, match="data-parallel rank 0 ended"):
            engine.flush_cache()


def test_a_rank_that_does_not_start_fails_the_start() -> None:
    with pytest.raises(WeightError, match="tensor lm_head"):
        start("build_rank_1_refused", dp_size=3)
    with pytest.raises(EngineDeadError, match="data-parallel rank 1 ended: .* exit code 7"):
        start("build_rank_1_exiting", inline=False, dp_size=2)


def test_a_rank_that_fails_or_hangs_in_a_thread_is_lost_like_one_that_dies() -> None:
    async def run(engine: Engine) -> list[Any]:
        return await asyncio.gather(
            *(collect(engine, request(f"{i} to go", max_new_tokens=60)) for i in range(6)),
            return_exceptions=True,
        )

    with start("build_faulty_ranks", dp_size=3) as engine:
        results = asyncio.run(run(engine))
        for i in (0, 3):
            assert results[i][-1].output_ids == continuation(list(f"{i} to go".encode()), 60)
        for rank, why in ((1, "scripted failure of launch"), (2, "hangs")):
            for i in (rank, rank + 3):
                assert isinstance(results[i], EngineDeadError) and why in str(results[i])
        assert engine.healthy and engine.gauges["num_dp_ranks"] == 1
        for i in range(3):
            ask(engine, f"{i} after that")
        assert by_rank(engine, "num_requests_total") == {0: 5}


def test_questions_and_aborts_reach_every_rank() -> None:
    async def run(engine: Engine) -> list[Any]:
        tasks = [
            asyncio.create_task(collect(engine, request(f"{i} to go", max_new_tokens=400)))
            for i in range(4)
        ]
        await asyncio.sleep(0.1)
        assert not engine._client.gauges.values["num_paused_reqs"]
        assert not (await engine.control("flush_cache")).ok, "both are busy"
        reply = await engine.control("pause_generation", mode="in_place")
        assert reply.ok
        states = (await engine.control("server_info")).payload["internal_states"]
        assert [state["paused"] for state in states] == [True, True]
        assert [state["num_paused_reqs"] for state in states] == [2, 2]
        await engine.control("continue_generation")
        engine.abort(abort_all=True)
        return await asyncio.gather(*tasks)

    with start(dp_size=2) as engine:
        for outputs in asyncio.run(run(engine)):
            finish = outputs[-1].finish
            assert finish is not None and finish.type == "abort"
        with pytest.raises(RequestError, match="mode"):
            engine.pause_generation("sideways")


def test_a_flush_is_of_every_rank_or_none_is_reported_and_placement_forgets() -> None:
    with start(dp_size=2) as engine:
        prompt = "a prompt that is longer than a few pages of the cache"
        ask(engine, prompt)
        ask(engine, prompt)
        assert by_rank(engine, "num_requests_total") == {0: 2, 1: 0}
        stream = engine.generate("keeps a rank busy", {"max_new_tokens": 450}, stream=True)
        next(stream)
        before = by_rank(engine, "kv_evictable_tokens")[0]
        assert before > 0 and not engine.flush_cache(), "one of two is busy"
        assert by_rank(engine, "kv_evictable_tokens")[0] == before, "the other has lost nothing"
        stream.close()
        assert engine.flush_cache(timeout=5)
        assert set(by_rank(engine, "kv_evictable_tokens").values()) == {0}
        ask(engine, prompt)
        ask(engine, "another one that knows nothing of the first")
        assert sum(by_rank(engine, "num_requests_total").values()) == 5
        assert min(by_rank(engine, "num_requests_total").values()) >= 2


def fronted(num_ranks: int) -> tuple[ranks.Front, list[Any]]:
    """A front whose ranks the test plays: each one's end of its channel."""
    ends = [local_ends() for _ in range(num_ranks)]
    front = ranks.Front([api for api, _ in ends], Placement(num_ranks, 4))
    for rank in range(num_ranks):
        front.receive(rank, [Progress(stage="ready")])
    front.drain()
    return front, [end for _, end in ends]


def test_ranks_that_are_shut_down_are_not_called_lost() -> None:
    front, _ = fronted(2)
    for rid in "ab":
        front.send(Submit(rid=rid, prompt_ids=[1], sampling=SamplingParams()))
    front.closing = True
    front.lose(0, "the engine process ended with exit code 0")
    (said,) = [one for one in front.drain() if isinstance(one, Deltas)]
    assert [one.finish and one.finish.message for one in said.items] == ["the engine was shut down"]


def test_a_request_may_name_its_rank_in_every_way_there_is() -> None:
    with start(dp_size=3) as engine:
        for name in ("routed_dp_rank", "data_parallel_rank"):
            body = ask(engine, "the same prompt every time, so that cache says 2", 4, **{name: 2})
            assert body["meta_info"]["dp_rank"] == 2
        several = engine.generate(["a", "b"], {"max_new_tokens": 2}, routed_dp_rank=[1, None])
        assert several[0]["meta_info"]["dp_rank"] == 1
        for wrong in (3, -1):
            with pytest.raises(RequestError, match=r"routed_dp_rank must be in \[0, 2\]") as error:
                engine.generate("a", routed_dp_rank=wrong)
            assert error.value.param == "routed_dp_rank"
        with pytest.raises(RequestError, match="differ"):
            engine.generate("a", routed_dp_rank=1, data_parallel_rank=2)
    with start() as engine:
        assert "dp_rank" not in engine.generate("a", routed_dp_rank=0)["meta_info"]
        with pytest.raises(RequestError, match=r"routed_dp_rank must be in \[0, 0\], got 1"):
            engine.generate("a", routed_dp_rank=1)


ROUTES = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
}


async def post(engine: Engine, path: str, more: dict[str, Any], **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(engine, engine.config))
    async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
        body, sent = ROUTES[path] | more, {name.replace("_", "-"): v for name, v in headers.items()}
        return await client.post(path, json=body, headers=sent)


@pytest.fixture(scope="module")
def three() -> Iterator[Engine]:
    with start(dp_size=3, enable_metrics=True) as engine:
        yield engine


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("more", "headers", "rank"),
    [
        ({"routed_dp_rank": 2}, {}, 2),
        ({"data_parallel_rank": 1}, {}, 1),
        ({"routed_dp_rank": 1, "data_parallel_rank": 1}, {}, 1),
        ({}, {"x_data_parallel_rank": "2"}, 2),
        ({"routed_dp_rank": 1}, {"x_data_parallel_rank": "0"}, 0),
        ({"routed_dp_rank": 1, "stream": True}, {}, 1),
    ],
)
def test_the_body_or_a_header_names_the_rank(
    three: Engine, path: str, more: dict[str, Any], headers: dict[str, str], rank: int
) -> None:
    before = by_rank(three, "num_requests_total")
    reply = asyncio.run(post(three, path, more, **headers))
    assert reply.status_code == 200, reply.text
    after = by_rank(three, "num_requests_total")
    assert {one: after[one] - before[one] for one in after} == {0: 0, 1: 0, 2: 0} | {rank: 1}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("more", "headers", "message"),
    [
        ({"routed_dp_rank": 3}, {}, r"routed_dp_rank must be in \[0, 2\], got 3"),
        ({"routed_dp_rank": "1"}, {}, "routed_dp_rank must be an integer"),
        ({"routed_dp_rank": 10**30}, {}, "routed_dp_rank must be an integer"),
        ({"data_parallel_rank": True}, {}, "data_parallel_rank must be an integer"),
        ({"routed_dp_rank": 1, "data_parallel_rank": 2}, {}, "data_parallel_rank differ"),
        ({}, {"x_data_parallel_rank": "one"}, "x-data-parallel-rank must be the number"),
        ({}, {"x_data_parallel_rank": "1" * 5000}, "x-data-parallel-rank must be the number"),
        ({}, {"x_data_parallel_rank": "7"}, r"routed_dp_rank must be in \[0, 2\], got 7"),
        ({"routed_dp_rank": 1, "colour": 2}, {}, "colour"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused_by_name(
    three: Engine, path: str, more: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    reply = asyncio.run(post(three, path, more, **headers))
    assert reply.status_code == 400
    assert re.search(message, reply.json().get("message") or reply.json()["error"]["message"])


def test_a_server_with_one_rank_takes_no_other() -> None:
    with start() as engine:
        for name in ("routed_dp_rank", "data_parallel_rank"):
            assert asyncio.run(post(engine, "/generate", {name: 0})).status_code == 200
            reply = asyncio.run(post(engine, "/generate", {name: 1}))
            assert reply.status_code == 400 and f"{name} must be 0" in reply.text


async def get(engine: Engine, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(engine, engine.config))
    async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
        return await client.get(path)


def test_loads_info_and_metrics_tell_the_ranks_apart(three: Engine) -> None:
    asyncio.run(post(three, "/generate", {"routed_dp_rank": 1}))
    wait_until(lambda: all(one.values for one in three._client.gauges.ranks.values()))
    body = asyncio.run(get(three, "/v1/loads")).json()
    assert [one["dp_rank"] for one in body["loads"]] == [0, 1, 2]
    assert body["num_accelerators"] == 3
    (one,) = asyncio.run(get(three, "/v1/loads?dp_rank=1")).json()["loads"]
    assert one["dp_rank"] == 1 and one["max_total_num_tokens"] == 399 * 4
    assert asyncio.run(get(three, "/v1/loads?dp_rank=3")).status_code == 400
    text = asyncio.run(get(three, "/v1/loads?format=prometheus")).text
    (running,) = [f for f in families(text) if f.name == "jserve_num_running_reqs"]
    assert [sample.labels["dp_rank"] for sample in running.samples] == ["0", "1", "2"]
    assert [one["dp_rank"] for one in asyncio.run(get(three, "/get_load")).json()] == [0, 1, 2]

    info = asyncio.run(get(three, "/server_info")).json()
    assert [one["dp_rank"] for one in info["internal_states"]] == [0, 1, 2]
    totals = [one["num_requests_total"] for one in info["internal_states"]]
    assert totals[1] > 0

    def shown() -> dict[str, list[Any]]:
        text = asyncio.run(get(three, "/metrics")).text
        told = families(text)
        assert [one.name for one in told if one.documentation == one.name.split(":")[1]] == []
        return {family.name: family.samples for family in told}

    wait_until(lambda: sum(three._client.gauges.values.values()) > 0)
    samples = shown()
    for name in ("jserve:num_running_reqs", "jserve:cache_active_references"):
        assert [one.labels["dp_rank"] for one in samples[name]] == ["0", "1", "2"]
    (alive,) = samples["jserve:num_dp_ranks"]
    assert alive.value == 3
    (aborted,) = samples["jserve:num_aborted_requests"]
    assert "dp_rank" not in aborted.labels, "requests are the front's"
    counts = [one for one in samples["jserve:queue_time_seconds"] if one.name.endswith("_count")]
    assert [one.labels["dp_rank"] for one in counts] == ["0", "1", "2"]


def families(text: str) -> list[Any]:
    return list(text_string_to_metric_families(text))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sequences_and_batches_go_where_their_prefix_was_computed() -> None:
    long = "a shared beginning that is worth computing once: " * 4
    with start(dp_size=2) as engine:
        parts = engine.generate(long, {"max_new_tokens": 4, "n": 4})
        assert len({one["meta_info"]["dp_rank"] for one in parts}) == 1
        assert all(one["meta_info"]["cached_tokens"] >= len(long) - 4 for one in parts)
        batch = engine.generate([f"{long[1:]}{i}" for i in range(4)], {"max_new_tokens": 4})
        assert len({one["meta_info"]["dp_rank"] for one in batch}) == 1
        assert all(one["meta_info"]["cached_tokens"] >= len(long) - 8 for one in batch)


def test_what_was_started_is_ended_when_the_rest_cannot_be_or_the_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []

    class Worker:
        sentinel = None

        def __init__(self, config: Config, builder: str) -> None:
            self.rank, self.living = config.replica.rank, True
            self.channel, _ = local_ends()
            if builder == "no room" and self.rank == 2:
                raise OSError("no room")

        def alive(self) -> bool:
            return self.living

        def cause(self) -> str:
            return "it was ended"

        def stop(self, patience: float) -> None:
            self.living = False
            ended.append((self.rank, patience > 0))
            if patience and self.rank == 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "EngineThread", Worker)
    config = Config.from_flags(model_path="m", dp_size=3)
    with pytest.raises(OSError, match="no room"):
        ranks.start_worker(config, "no room", True)
    assert sorted(ended) == [(0, False), (1, False)]
    ended.clear()
    worker = ranks.start_worker(config, "a builder", True)
    with pytest.raises(KeyboardInterrupt):
        worker.stop(1.0)
    assert (0, True) in ended and {rank for rank, _ in ended} == {0, 1, 2}


def test_after_a_storm_of_requests_that_end_in_every_way_no_rank_has_anything_open() -> None:
    """Answers, stop strings, aborts by id and by beginning, clients that leave, ids used again,
    refusals, several sequences; a rank breaks in the middle of it."""
    random, ends = Random(0), Counter[str]()

    async def one(engine: Engine, i: int) -> None:
        prompt, count = f"{i % 7} is where it begins", random.randrange(1, 60)
        expected = bytes(continuation(list(prompt.encode()), count)).decode()
        stop = (expected[len(expected) // 2],) if random.random() < 0.3 else ()
        asked = request(
            prompt, max_new_tokens=count, stop=stop, n=1 if random.random() < 0.9 else 3
        )
        rank = 5 if random.random() < 0.05 else None
        asked = msgspec.structs.replace(asked, rid=f"r{i % 40}", routed_dp_rank=rank)
        leaves = random.random() < 0.2
        try:
            async with contextlib.aclosing(engine.generate_stream(asked)) as outputs:
                async for output in outputs:
                    if leaves:
                        ends["left"] += 1
                        return
                    if output.finish is not None:
                        ends[output.finish.type] += 1
                        whole = expected.partition(stop[0])[0] if stop else expected
                        assert output.finish.type == "abort" or output.text == whole
        except (RequestError, EngineDeadError) as error:
            ends[type(error).__name__] += 1

    async def storm(engine: Engine) -> None:
        tasks = []
        for i in range(400):
            tasks.append(asyncio.create_task(one(engine, i)))
            if i % 4 == 0:
                await asyncio.sleep(0.004)
            if i % 23 == 0:
                engine.abort(f"r{random.randrange(40)}")
        await asyncio.gather(*tasks)

    with start("build_storm", dp_size=3) as engine:
        asyncio.run(storm(engine))
        assert engine.gauges["num_dp_ranks"] == 2
        expected = {"length", "stop", "abort", "left", "RequestError", "EngineDeadError"}
        assert ends.keys() == expected, ends
        placement = engine._life.worker._front._placement  # type: ignore[attr-defined]
        wait_until(lambda: all(load.num_requests == 0 for load in placement.loads()))
        assert not placement._open and not any(load.num_tokens for load in placement.loads())
        states = engine.get_server_info()["internal_states"]
        assert [one["num_running_reqs"] + one["num_queue_reqs"] for one in states] == [0, 0]
