"""Aborts of requests that are accepted and not yet sent, and the pause that comes between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_engine import start, text_of

from jserve.engine.engine import Engine
from jserve.errors import RequestError
from jserve.types import Abort, ControlReply, GenerateRequest, Output, SamplingParams, Submit


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as engine:
        yield engine


async def collect(engine: Engine, batch: list[GenerateRequest]) -> list[Output]:
    """The last Output of each sequence, in order."""
    async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
        last = [output async for output in outputs if output.finish is not None]
    return sorted(last, key=lambda output: output.index)


def asked(rid: str, text: str = "hello", n: int = 1, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, n=n, **sampling)
    return GenerateRequest(text=text, rid=rid, sampling=params)


REQUESTS = {
    "plain": [asked("v", stop_regex=("Z+",))],
    "sequences": [asked("v", "x" * 100, n=3, stop_regex=("Z+",))],
    "batch": [asked("v_0"), asked("v_1", stop_regex=("Z+",)), asked("v_2", n=2)],
}
KINDS = ("plain", "sequences", "batch")


class Gate:
    """Work in a thread that waits for `opened`."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work, self.entered, self.opened = work, threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(10)
        return self._work(*arguments)


@pytest.fixture(params=["text", "stop_regex"])
def gate(engine: Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """What is done for a request in a thread before it is sent."""
    if request.param == "text":
        gate = Gate(engine.tokenizer.encode)
        monkeypatch.setattr("jserve.engine.submission._LONG_TEXT", 4)
        monkeypatch.setattr(engine.tokenizer, "encode", gate)
    else:
        gate = Gate(lambda patterns: None)
        monkeypatch.setattr("jserve.engine.submission.check_stop_regexes", gate)
    return gate


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


@pytest.mark.parametrize("how", ["id", "all", "pause"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_what_is_being_tokenized_or_checked(
    engine: Engine, sent: list[Any], gate: Gate, kind: str, how: str
) -> None:
    async def scenario() -> list[Output]:
        waiting = asyncio.create_task(collect(engine, REQUESTS[kind]))
        await entered(gate)
        if how == "pause":
            await engine.control("pause_generation")
            await engine.control("continue_generation")
        else:
            engine.abort("v" if how == "id" else "", abort_all=how == "all")
        gate.opened.set()
        return await asyncio.wait_for(waiting, 5)

    outputs = asyncio.run(scenario())
    assert len(outputs) == sum(one.sampling.n for one in REQUESTS[kind])
    for output in outputs:
        assert output.finish is not None and output.finish.type == "abort"
        assert output.finish.status_code is None and output.output_ids == []
    assert not [m for m in sent if isinstance(m, Submit)], "the engine was asked"
    assert not engine._client.routes


def test_an_abort_of_one_sequence_leaves_the_others(
    engine: Engine, gate: Gate, sent: list[Any]
) -> None:
    async def scenario() -> list[Output]:
        waiting = asyncio.create_task(collect(engine, REQUESTS["sequences"]))
        await entered(gate)
        engine.abort("v_1")
        gate.opened.set()
        return await asyncio.wait_for(waiting, 5)

    outputs = asyncio.run(scenario())
    kinds = [output.finish and output.finish.type for output in outputs]
    assert kinds == ["length", "abort", "length"]
    assert outputs[0].text == outputs[2].text == text_of("x" * 100, 12)
    assert not [m for m in sent if isinstance(m, Submit) and m.rid == "v_1"]


def test_an_id_is_in_use_while_its_text_is_tokenized(engine: Engine, gate: Gate) -> None:
    async def scenario() -> None:
        first = asyncio.create_task(collect(engine, REQUESTS["plain"]))
        await entered(gate)
        with pytest.raises(RequestError, match="rid v is in use"):
            await asyncio.wait_for(collect(engine, REQUESTS["plain"]), 5)
        gate.opened.set()
        (output,) = await asyncio.wait_for(first, 5)
        assert output.text == text_of("hello", 12)

    asyncio.run(scenario())
    assert not engine._client.routes


def test_a_thread_aborts_a_request_in_the_moment_that_it_is_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = []
    send = engine._client.send

    def aborted_first(message: Any) -> None:
        if isinstance(message, Submit) and not messages:
            messages.append(message)
            thread = threading.Thread(target=engine.abort, args=("v",))
            thread.start()  # what it sends comes before the request
            thread.join()
        messages.append(message)
        send(message)

    monkeypatch.setattr(engine._client, "send", aborted_first)
    (output,) = asyncio.run(collect(engine, [asked("v")]))
    assert output.finish is not None and output.finish.type == "abort"
    assert [type(m) for m in messages] == [Submit, Abort, Submit, Abort]
    assert [m.exact for m in messages if isinstance(m, Abort)] == [False, True]


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_comes_between_a_pause_and_its_reply_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    control = engine._client.control

    async def scenario() -> list[Output]:
        later: list[asyncio.Task[list[Output]]] = []

        async def late_reply(op: str, **args: Any) -> ControlReply:
            reply = await control(op, **args)
            if op == "pause_generation":  # it has taken effect, and its caller does not know yet
                later.append(asyncio.create_task(collect(engine, [asked("later", n=n)])))
                await asyncio.sleep(0.05)
            return reply

        monkeypatch.setattr(engine._client, "control", late_reply)
        await engine.control("pause_generation")
        await asyncio.sleep(0.05)
        assert not later[0].done()
        await engine.control("continue_generation")
        return await asyncio.wait_for(later[0], 5)

    outputs = asyncio.run(scenario())
    assert [output.text for output in outputs] == [text_of("hello", 12)] * n


@pytest.mark.parametrize("n", [0, -1, 129, 2**62])
def test_a_number_of_sequences_is_checked_before_it_is_claimed(engine: Engine, n: int) -> None:
    for batch in ([asked("v", n=n)], [asked("w"), asked("v", n=n)]):
        with pytest.raises(RequestError, match="^n must be in"):
            asyncio.run(collect(engine, batch))
    assert not engine._client.routes
