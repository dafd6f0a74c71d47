"""Ids of requests that wait to be sent: free again however a request ends, at whatever await."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any

import httpx
import pytest
from test_batch_warmup import PREFIX, TAILS
from test_grammar_engine import start

from jserve.engine.client import EngineClient
from jserve.engine.core import EngineCore
from jserve.engine.engine import Engine
from jserve.errors import EngineDeadError, RequestError
from jserve.server.app import create_app
from jserve.types import GenerateRequest, SamplingParams, Submit


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as engine:
        yield engine


@dataclasses.dataclass
class Cancelling:
    """Awaits `coroutine` and cancels it at its await number `at`: `done`: when that is over, else
    before anything else runs. `fired`: it came so far."""

    coroutine: Coroutine[Any, Any, Any]
    at: int
    done: bool
    fired: bool = False

    def __await__(self) -> Generator[Any, Any, Any]:
        count = 0
        try:
            waits_for = self.coroutine.send(None)
            while True:
                cancel = count == self.at and not self.fired
                if not cancel or self.done:
                    yield waits_for
                if cancel:
                    self.fired = True
                    waits_for = self.coroutine.throw(asyncio.CancelledError())
                else:
                    count += 1
                    waits_for = self.coroutine.send(None)
        except StopIteration as end:
            return end.value


def asked(rid: str, text: str, n: int = 1, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=2, temperature=0.0, n=n, **sampling)
    return GenerateRequest(text=text, rid=rid, sampling=params)


REQUESTS = {
    "plain": [asked("a", "one")],
    "bound": [asked("a", "one", regex="x{8}")],
    "sequences": [asked("a", PREFIX, n=3)],
    "bound sequences": [asked("a", PREFIX, n=2, regex="x{8}")],
    "batch": [asked(f"b_{i}", PREFIX + TAILS[i]) for i in range(3)],
    "bound batch": [
        asked("b_0", PREFIX + TAILS[0], regex="x{8}"),
        asked("b_1", PREFIX + TAILS[1]),
        asked("b_2", PREFIX + TAILS[2], n=2),
    ],
}
LEAST_AWAITS = {"plain": 1, "bound": 2, "sequences": 2, "bound sequences": 3, "batch": 5}


async def collect(engine: Engine, batch: list[GenerateRequest]) -> list[str]:
    async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
        last = [one async for one in outputs if one.finish is not None]
    return [one.text for one in sorted(last, key=lambda one: one.index)]


def is_free(client: EngineClient) -> bool:
    return client.routes == {}


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("what", REQUESTS)
def test_ids_are_free_again_whatever_await_a_request_is_cancelled_at(
    engine: Engine, what: str, done: bool
) -> None:
    async def run() -> int:
        expected = await collect(engine, REQUESTS[what])
        for at in range(1000):
            engine.grammars.flush()
            cancelling = Cancelling(collect(engine, REQUESTS[what]), at, done)
            try:
                answers = await cancelling
            except asyncio.CancelledError:
                assert cancelling.fired
                assert is_free(engine._client), f"{at=} {engine._client.routes=}"
            else:
                assert not cancelling.fired and answers == expected
                return at
            if at % 3 == 0:
                assert await collect(engine, REQUESTS[what]) == expected
        raise AssertionError("it never ended")

    assert asyncio.run(run()) >= LEAST_AWAITS.get(what, 6)
    assert is_free(engine._client)


def test_a_batch_whose_streams_have_not_begun_frees_its_ids(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[Any]] = []

    async def never_begun(self: EngineCore, asked: list[Any]) -> AsyncIterator[Any]:
        made.append(asked)
        assert set(engine._client.routes) == {"b_0", "b_1", "b_2"}
        raise asyncio.CancelledError
        yield

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "outputs", never_begun)
            with pytest.raises(asyncio.CancelledError):
                await collect(engine, REQUESTS["batch"])
        assert len(made[0]) == 3 and is_free(engine._client)
        assert len(await collect(engine, REQUESTS["batch"])) == 3

    asyncio.run(run())


FAULTS = {
    "making its sequences": ("jserve.engine.core.Sequence", "bound"),
    "the warm-up of its sequences": ("jserve.engine.fanout.prefix_of", "bound sequences"),
    "the warm-up of its batch": ("jserve.engine.batch_stream.shared_prefixes", "bound batch"),
    "its streams": ("jserve.engine.core.EngineCore.outputs", "bound batch"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_request_that_fails_between_its_grammar_and_its_sending_frees_its_ids(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    place, what = FAULTS[where]

    def broken(*_: Any) -> None:
        raise RuntimeError("scripted")

    async def run() -> None:
        engine.grammars.flush()  # so that it waits for its grammar, as the owner of its ids
        with monkeypatch.context() as patch:
            patch.setattr(place, broken)
            with pytest.raises(RuntimeError, match="scripted"):
                await collect(engine, REQUESTS[what])
        assert is_free(engine._client)
        assert await collect(engine, REQUESTS[what])

    asyncio.run(run())


def test_a_request_whose_engine_died_before_it_was_sent_frees_its_ids(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = engine._client.send

    def dead(message: Any) -> None:
        if isinstance(message, Submit):
            raise EngineDeadError("scripted")
        send(message)

    async def run() -> None:
        for what in REQUESTS:
            engine.grammars.flush()
            with monkeypatch.context() as patch:
                patch.setattr(engine._client, "send", dead)
                with pytest.raises(EngineDeadError):
                    await collect(engine, REQUESTS[what])
            assert is_free(engine._client), what
            assert not engine._client.left, "nothing is heard of what was not sent"

    asyncio.run(run())


def test_a_batch_that_names_an_id_twice_is_refused_and_frees_it(engine: Engine) -> None:
    async def run() -> None:
        with pytest.raises(RequestError, match="rid b_0 is in this batch twice"):
            await collect(engine, [REQUESTS["batch"][0], REQUESTS["batch"][0]])
        assert is_free(engine._client)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("rids", "ns", "twice"),
    [(["a", "b", "a"], (1, 1, 1), "a"), (["a", "a"], (2, 2), "a_0"), (["a", "a_1"], (2, 1), "a_1")],
)
def test_an_id_that_a_batch_uses_twice_is_not_called_another_requests(
    engine: Engine, rids: list[str], ns: tuple[int, ...], twice: str
) -> None:
    def refused(send: Callable[[], Any]) -> None:
        with pytest.raises(RequestError, match=f"rid {twice} is in this batch twice") as error:
            send()
        assert error.value.param == "rid" and "in use" not in str(error.value)
        assert is_free(engine._client)

    requests = [asked(rid, "hello", n) for rid, n in zip(rids, ns, strict=True)]
    params = [{"max_new_tokens": 2, "n": n} for n in ns]
    prompts = ["hello"] * len(rids)
    refused(lambda: asyncio.run(collect(engine, requests)))
    refused(lambda: engine.generate(prompts, params, rid=rids))
    refused(lambda: list(engine.generate(prompts, params, rid=rids, stream=True)))
    body = {"text": prompts, "sampling_params": params, "rid": rids}
    for stream in (False, True):
        reply = post(engine, "/generate", body | {"stream": stream})
        assert reply.status_code == 400 and f"rid {twice} is in this batch twice" in reply.text
        if len(set(rids)) == len(rids):
            continue  # /v1 has one n for all
        body_v1 = {"prompt": prompts, "rid": rids, "n": ns[0], "stream": stream}
        reply = post(engine, "/v1/completions", body_v1)
        assert reply.status_code == 400 and f"rid {rids[0]} is in this batch twice" in reply.text


def test_an_id_of_another_request_is_told_as_such_to_a_batch(engine: Engine) -> None:
    async def run() -> None:
        match = "rid b is in use by an open request"
        with engine._client.claim(["b"]), pytest.raises(RequestError, match=match):
            await collect(engine, [asked("a", "hello"), asked("b", "hello")])

    asyncio.run(run())


def post(engine: Engine, path: str, body: dict[str, Any]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(engine, engine.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
            return await client.post(path, json=body)

    return asyncio.run(send())
