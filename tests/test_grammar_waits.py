"""Requests that wait for their grammars: what ends the wait, how many may, and what it holds up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from test_grammar_engine import first, start

from jserve.config import SchedulerOptions
from jserve.engine.engine import Engine
from jserve.engine.flush import flush_when_idle
from jserve.engine.grammar_waits import GrammarWaits
from jserve.engine.route import Route
from jserve.errors import QueueFullError, RequestError, TimedOutError
from jserve.grammar.backend import GrammarUnavailable
from jserve.types import ControlReply, Gauges, GenerateRequest, GrammarSpec, SamplingParams


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start(enable_metrics=True) as engine:
        yield engine


async def every(engine: Engine, batch: list[GenerateRequest]) -> list[Any]:
    """The last Output of each sequence, in order."""
    async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
        last = [output async for output in outputs if output.finish is not None]
    return sorted(last, key=lambda output: output.index)


@pytest.fixture
def never(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> concurrent.futures.Future[Any]:
    """A compilation that goes on until the test ends it."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    compile_ = engine.grammars._compile
    monkeypatch.setattr(
        engine.grammars,
        "_compile",
        lambda spec: future if spec.text == "slow" else compile_(spec),
    )
    return future


@pytest.fixture
def left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compilations that requests wait for no more, in order."""
    left: list[Any] = []
    monkeypatch.setattr(engine.grammars, "_leave", lambda spec, future: left.append(future))
    return left


def test_a_waiting_grammar_delays_its_own_request_only(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        slow = GenerateRequest(text="a", sampling=SamplingParams(regex="slow"))
        waiting = asyncio.create_task(first(engine, slow))
        await asyncio.sleep(0.05)
        gauge = engine.metrics.render().decode()
        assert re.search(r"num_grammar_queue_reqs\{[^}]*\} 1.0", gauge)
        for sampling in (SamplingParams(max_new_tokens=3), SamplingParams(regex="abc")):
            output = await first(engine, GenerateRequest(text="b", sampling=sampling))
            assert output.finish.type in ("length", "stop")
        assert not waiting.done()
        spec = GrammarSpec(kind="regex", text="fast")
        never.set_result(await asyncio.wrap_future(engine.grammars._compile(spec)))
        assert (await waiting).text == "fast"

    asyncio.run(run())


def test_a_client_that_leaves_while_its_grammar_compiles_is_forgotten(
    engine: Engine, never: concurrent.futures.Future[Any], left: list[Any]
) -> None:
    async def run() -> None:
        request = GenerateRequest(text="a", rid="leaver", sampling=SamplingParams(regex="slow"))
        waiting = asyncio.create_task(first(engine, request))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not engine._client.routes
        assert not never.cancelled() and left == [never]  # others may wait for it

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["id", "all", "pause"])
def test_an_abort_ends_a_request_at_once_whose_grammar_compiles(
    engine: Engine, never: concurrent.futures.Future[Any], left: list[Any], how: str, n: int
) -> None:
    async def run() -> None:
        sampling = SamplingParams(regex="slow", n=n)
        request = GenerateRequest(text="a", rid="early", sampling=sampling)
        waiting = asyncio.create_task(every(engine, [request]))
        await asyncio.sleep(0.05)
        if how == "pause":
            await engine.control("pause_generation", mode="abort")
            await engine.control("continue_generation")
        else:
            engine.abort("early" if how == "id" else "", abort_all=how == "all")
        for output in await asyncio.wait_for(waiting, 5):
            assert output.finish.type == "abort" and not output.output_ids
            assert output.finish.status_code is None and output.prompt_tokens == 1
        assert not never.done() and not engine._client.routes and left == [never]

    asyncio.run(run())


def test_one_of_n_sequences_that_is_aborted_meanwhile_never_begins(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        sampling = SamplingParams(regex="slow", n=3)
        request = GenerateRequest(text="a" * 80, rid="early", sampling=sampling)  # warmed up
        waiting = asyncio.create_task(every(engine, [request]))
        await asyncio.sleep(0.05)
        engine.abort("early_1")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        spec = GrammarSpec(kind="regex", text="fast")
        never.set_result(await asyncio.wrap_future(engine.grammars._compile(spec)))
        outputs = await asyncio.wait_for(waiting, 10)
        assert [one.finish.type for one in outputs] == ["stop", "abort", "stop"]
        assert [one.text for one in outputs] == ["fast", "", "fast"]

    asyncio.run(run())


def test_an_abort_reaches_the_members_of_a_batch_that_wait_for_a_grammar(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    def member(rid: str, **sampling: Any) -> GenerateRequest:
        return GenerateRequest(text="a", rid=rid, sampling=SamplingParams(**sampling))

    batch = [member("b_0", regex="slow"), member("b_1", regex="abc"), member("b_2")]

    async def run() -> None:
        waiting = asyncio.create_task(every(engine, batch))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        engine.abort("b_2")
        engine.abort("b_0")
        outputs = await asyncio.wait_for(waiting, 5)
        assert [one.finish.type for one in outputs] == ["abort", "stop", "abort"]
        assert outputs[1].text == "abc" and not engine._client.routes

    asyncio.run(run())


def test_an_id_that_waits_for_a_grammar_is_in_use(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        request = GenerateRequest(text="a", rid="twice", sampling=SamplingParams(regex="slow"))
        waiting = asyncio.create_task(first(engine, request))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="rid twice is in use"):
            await first(engine, request)
        engine.abort("twice")
        assert (await asyncio.wait_for(waiting, 5)).finish.type == "abort"

    asyncio.run(run())


OTHERS = {
    "plain": [GenerateRequest(text="b", rid="own", sampling=SamplingParams())],
    "known": [GenerateRequest(text="b", rid="own", sampling=SamplingParams(regex="abc"))],
    "sequences": [GenerateRequest(text="b", rid="o", sampling=SamplingParams(n=2))],
    "warmed up": [GenerateRequest(text="b" * 80, rid="o", sampling=SamplingParams(n=2))],
    "batch": [
        GenerateRequest(text="b", rid=rid, sampling=SamplingParams()) for rid in ("other", "own")
    ],
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_id_that_waits_for_a_grammar_is_its_own_beside_any_other_request(
    engine: Engine, never: concurrent.futures.Future[Any], other: str
) -> None:
    async def run() -> None:
        if other == "known":
            await every(engine, [GenerateRequest(text="b", sampling=SamplingParams(regex="abc"))])
        rid = "o_1" if other in ("sequences", "warmed up") else "own"
        slow = GenerateRequest(text="a", rid=rid, sampling=SamplingParams(regex="slow"))
        for ended in (False, True):
            waiting = asyncio.create_task(every(engine, [slow]))
            await asyncio.sleep(0.05)
            with pytest.raises(RequestError, match=f"rid {rid} is in use"):
                await asyncio.wait_for(every(engine, OTHERS[other]), 5)
            assert list(engine._client.routes) == [rid]
            if not ended:
                engine.abort(rid)
            elif not never.done():
                spec = GrammarSpec(kind="regex", text="fast")
                never.set_result(await asyncio.wrap_future(engine.grammars._compile(spec)))
            (output,) = await asyncio.wait_for(waiting, 5)
            assert (output.finish.type, output.text) == (("abort", ""), ("stop", "fast"))[ended]
        assert not engine._client.routes

    asyncio.run(run())


def test_a_grammar_is_not_compiled_for_an_id_of_a_running_request(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
        running = GenerateRequest(text="a", rid="own", sampling=sampling, stream=True)
        async with contextlib.aclosing(engine.generate_stream(running)) as outputs:
            await anext(outputs)
            slow = GenerateRequest(text="a", rid="own", sampling=SamplingParams(regex="slow"))
            with pytest.raises(RequestError, match="rid own is in use"):
                await asyncio.wait_for(first(engine, slow), 5)
            last = [output async for output in outputs][-1]
            assert last.finish is not None and last.finish.type == "length"
            assert not engine._client.routes

    asyncio.run(run())


def test_the_end_of_a_batch_leaves_an_id_alone_that_another_request_has_since(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        batch = [
            GenerateRequest(text="a", rid=f"b_{i}", sampling=SamplingParams(max_new_tokens=count))
            for i, count in enumerate((1, 20))
        ]
        async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
            assert (await anext(outputs)).index == 0  # and b_0 is free again
            slow = GenerateRequest(text="a", rid="b_0", sampling=SamplingParams(regex="slow"))
            waiting = asyncio.create_task(first(engine, slow))
            await asyncio.sleep(0.05)
        engine.abort("b_0")
        assert (await asyncio.wait_for(waiting, 5)).finish.type == "abort"

    asyncio.run(run())


def test_a_flush_is_refused_while_a_grammar_compiles_but_for_a_pause(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    async def run() -> None:
        request = GenerateRequest(text="a", rid="busy", sampling=SamplingParams(regex="slow"))
        waiting = asyncio.create_task(first(engine, request))
        await asyncio.sleep(0.05)
        assert not (await engine.control("flush_cache")).ok
        await engine.control("pause_generation", mode="retract")
        assert (await engine.control("flush_cache")).ok
        await engine.control("continue_generation")
        assert not (await engine.control("flush_cache")).ok
        engine.abort("busy")
        await asyncio.wait_for(waiting, 5)
        assert (await flush_when_idle(engine.control, 5.0)).ok

    asyncio.run(run())


@pytest.fixture(scope="module")
def limited() -> Iterator[Engine]:
    with start(max_queued_requests=2, req_waiting_timeout=2.0) as engine:
        for text in ("known", "b"):
            engine.grammars._compile(GrammarSpec(kind="regex", text=text)).result(60)
        yield engine


def test_a_grammar_that_may_be_tried_again_is_no_fault_of_its_request(
    engine: Engine, never: concurrent.futures.Future[Any]
) -> None:
    never.set_exception(GrammarUnavailable("others wait: try again later"))
    slow = GenerateRequest(text="a", sampling=SamplingParams(regex="slow"))
    with pytest.raises(
        TimedOutError, match="regex grammar: others wait: try again later"
    ) as caught:
        asyncio.run(first(engine, slow))
    assert caught.value.status_code == 503


def test_waits_for_grammars_count_for_the_queue_limit_and_what_is_known_does_not_wait(
    limited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = concurrent.futures.Future[Any]()
    compile_ = limited.grammars._compile
    monkeypatch.setattr(limited.grammars, "_compile", lambda spec: hold)

    def bound(text: str, n: int = 1) -> GenerateRequest:
        return GenerateRequest(text="a", sampling=SamplingParams(regex=text, n=n))

    async def run() -> None:
        with pytest.raises(QueueFullError):
            await first(limited, bound("too many", n=3))
        waiting = [asyncio.create_task(first(limited, bound(f"new {i}"))) for i in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError, match="The request queue is full"):
            await first(limited, bound("one more"))
        assert (await first(limited, bound("known"))).text == "known"
        free = GenerateRequest(text="a", sampling=SamplingParams(max_new_tokens=2))
        assert (await first(limited, free)).finish.type == "length"
        hold.set_result(await asyncio.wrap_future(compile_(GrammarSpec(kind="regex", text="b"))))
        assert [(await one).text for one in waiting] == ["b", "b"]

    asyncio.run(run())


def test_what_waits_in_the_queue_counts_beside_waits_for_grammars(limited: Engine) -> None:
    async def run() -> None:
        await limited.control("pause_generation", mode="in_place")
        free = GenerateRequest(text="a", sampling=SamplingParams(max_new_tokens=2))
        queued = [asyncio.create_task(first(limited, free)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError, match="The request queue is full"):
            await first(limited, GenerateRequest(text="a", sampling=SamplingParams(regex="new")))
        await limited.control("continue_generation")
        assert [(await one).finish.type for one in queued] == ["length", "length"]

    asyncio.run(run())


def test_a_wait_for_a_grammar_ends_with_the_waiting_timeout(
    limited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = concurrent.futures.Future[Any]()
    monkeypatch.setattr(limited.grammars, "_compile", lambda spec: hold)

    async def run() -> None:
        start = time.monotonic()
        with pytest.raises(TimedOutError, match=r"longer than 2 s \(--req-waiting-timeout\)"):
            await first(limited, GenerateRequest(text="a", sampling=SamplingParams(regex="new")))
        assert 1.9 < time.monotonic() - start < 9
        assert not hold.cancelled() and not limited._client.routes

    asyncio.run(run())


def test_a_wait_that_is_over_is_told_to_the_compiler(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, told = concurrent.futures.Future[Any](), []
    compiler = engine.grammars._ready()
    monkeypatch.setattr(compiler, "compile", lambda spec: hold)
    monkeypatch.setattr(compiler, "leave", lambda *which: told.append(which))

    async def run() -> None:
        request = GenerateRequest(text="a", sampling=SamplingParams(regex="left alone"))
        waiting = asyncio.create_task(first(engine, request))
        await asyncio.sleep(0.05)
        assert not told
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert told == [(GrammarSpec(kind="regex", text="left alone"), hold)]

    asyncio.run(run())


class Ranked:
    """The client of an engine with so many ranks, in whose queues `queued` wait together."""

    def __init__(self, ranks: float | None, queued: int) -> None:
        self.gauges = Gauges(values={} if ranks is None else {"num_dp_ranks": ranks})
        self.queued = queued

    async def control(self, op: str) -> ControlReply:
        return ControlReply(id="1", ok=True, payload={"num_queue_reqs": self.queued})


@pytest.mark.parametrize(
    ("ranks", "queued", "room"),
    [(None, 3, True), (None, 4, False), (2.0, 4, True), (2.0, 7, True), (2.0, 8, False)],
)
def test_the_queue_limit_holds_for_the_queues_of_all_ranks_together(
    ranks: float | None, queued: int, room: bool
) -> None:
    client = cast(Any, Ranked(ranks, queued))
    waits = GrammarWaits(client, SchedulerOptions(max_queued_requests=4))
    done = concurrent.futures.Future[Any]()
    done.set_result("compiled")

    async def run() -> Any:
        claims = [Route("one", 1, asyncio.get_running_loop())]
        return await waits.compiled(claims, lambda: done, lambda future: None)

    if room:
        assert asyncio.run(run()) == "compiled"
    else:
        with pytest.raises(QueueFullError):
            asyncio.run(run())


def test_an_engine_that_does_not_answer_keeps_a_request_waiting_and_refuses_none() -> None:
    asked: list[str] = []

    class Deaf(Ranked):
        async def control(self, op: str) -> Any:
            asked.append(op)
            raise TimedOutError("no answer of the engine within 10 s")

    waits = GrammarWaits(cast(Any, Deaf(None, 0)), SchedulerOptions(max_queued_requests=4))
    done = concurrent.futures.Future[Any]()
    done.set_result("compiled")

    async def run() -> Any:
        claims = [Route("one", 1, asyncio.get_running_loop())]
        return await waits.compiled(claims, lambda: done, lambda future: None)

    assert asyncio.run(run()) == "compiled" and asked == ["server_info"]
