"""Streams that are read late, or never: what the engine says is taken in at once, so stop strings
end their requests, and what waits is one Output a sequence, made when it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from fake_engine import ByteTokenizer, continuation
from test_engine import collect, request, start, text_of
from test_metrics import samples
from test_metrics import start as start_metered

from jserve.config import ServerOptions
from jserve.engine.engine import Engine
from jserve.engine.sequence import Sequence
from jserve.metrics.meter import NO_METER
from jserve.server.bodies import ChatBody, CompletionBody
from jserve.server.chat import ChatShape
from jserve.server.completions import CompletionShape
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.types import (
    Abort,
    Delta,
    GenerateRequest,
    LogprobParams,
    Output,
    SamplingParams,
    Submit,
    TokenLogprobs,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as engine:
        yield engine


def new_sequence(**fields: Any) -> Sequence:
    sampling = SamplingParams(max_new_tokens=40_000)
    submit = Submit(rid="r", prompt_ids=[1], sampling=sampling, stream=True, **fields)
    return Sequence(0, submit, ByteTokenizer(), NO_METER, ServerOptions())  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


async def idle(engine: Engine) -> dict[str, float]:
    """The engine's numbers once it has nothing to do."""
    while not (await engine.control("flush_cache")).ok:
        await asyncio.sleep(0.005)
    return (await engine.control("server_info")).payload


def test_a_stop_string_ends_its_request_while_nobody_reads(engine: Engine, sent: list[Any]) -> None:
    whole = text_of("hello", 400)
    stop = whole[30:34]
    asked = request(max_new_tokens=400, stop=(stop,))

    async def scenario() -> tuple[float, list[Output]]:
        before = (await idle(engine))["generation_tokens_total"]
        async with contextlib.aclosing(engine.generate_stream(asked)) as outputs:
            first = await anext(outputs)
            after = (await idle(engine))["generation_tokens_total"]
            assert [(m.rid, m.stopped) for m in sent if isinstance(m, Abort)] == [(first.rid, True)]
            assert not engine._client.routes  # its id is free before its end is read
            return after - before, [first, *[output async for output in outputs]]

    generated, outputs = asyncio.run(scenario())
    assert generated < 200, "it went on to its length"
    assert outputs[-1].finish is not None and outputs[-1].finish.matched == stop
    assert outputs[-1].text == whole[: whole.index(stop)]
    assert "".join(output.delta for output in outputs) == outputs[-1].text


@pytest.mark.parametrize("prompts", [["ab"], ["ab", "cde", "f"]])
def test_what_comes_while_nobody_reads_is_one_output_a_sequence(
    engine: Engine, prompts: list[str]
) -> None:
    batch = [request(prompt, max_new_tokens=60, n=2) for prompt in prompts]
    size = 2 * len(prompts)

    async def scenario() -> list[Output]:
        async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
            read = [await anext(outputs)]
            await idle(engine)
            return read + [output async for output in outputs]

    read = asyncio.run(scenario())
    assert len(read) == 1 + size, "one that waited, and what was read before"
    assert [output.finish for output in read[:1]] == [None]
    for index in range(size):
        own = [output for output in read if output.index == index]
        prompt, last = prompts[index // 2], own[-1]
        assert last.finish is not None and last.finish.type == "length"
        assert "".join(output.delta for output in own) == last.text == text_of(prompt, 60)
        gained = [token for output in own for token in output.new_ids]
        assert gained == last.output_ids == continuation(list(prompt.encode()), 60)


def test_a_sequence_that_nobody_reads_keeps_one_output_and_little_memory() -> None:
    sequence = new_sequence()
    tracemalloc.start()
    try:
        due = [sequence.push(Delta(rid="r", token_ids=[97])) for _ in range(16_000)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert due == [True] + [False] * 15_999
    assert held < 2 << 20, f"{held} bytes"
    assert sequence.output().delta == "a" * 16_000
    assert sequence.push(Delta(rid="r", token_ids=[98])) and sequence.output().delta == "b"


CHAT = {"model": "m", "messages": [], "stream": True}
SHAPES = {
    "chat": lambda: ChatShape(ChatBody(**CHAT), ByteTokenizer()),  # type: ignore[arg-type]
    "text": lambda: CompletionShape(
        CompletionBody(model="m", prompt="a", stream=True),
        ByteTokenizer(),  # type: ignore[arg-type]
        ["a"],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_chunk_of_a_stream_takes_no_copy_of_what_was_said_before(name: str) -> None:
    sequence, shape = new_sequence(), SHAPES[name]()
    sequence.push(Delta(rid="r", token_ids=[97] * 32_000))
    shape.chunks(sequence.output())
    sequence.push(Delta(rid="r", token_ids=[98]))
    tracemalloc.start()
    try:
        output = sequence.output()
        chunks = shape.chunks(output)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chunks and output.delta == "b"
    assert peak < 8192, f"{peak} bytes"
    assert output.text == "a" * 32_000 + "b" and len(output.output_ids) == 32_001


def scored(ids: list[int]) -> TokenLogprobs:
    pairs = [[(-token / 100, token)] for token in ids]
    values = [-token / 100 for token in ids]
    return TokenLogprobs(token_ids=ids, values=values, top=pairs)  # type: ignore[arg-type]


def test_an_output_says_the_same_after_more_has_come() -> None:
    sequence = new_sequence(logprobs=LogprobParams(top_num=1))
    outputs = []
    for ids in ([97, 98], [99], [100, 101]):
        sequence.push(Delta(rid="r", token_ids=ids, logprobs=scored(ids)))
        outputs.append(sequence.output())
    assert [output.text for output in outputs] == ["ab", "abc", "abcde"]
    assert [output.delta for output in outputs] == ["ab", "c", "de"]
    assert [len(output.output_ids) for output in outputs] == [2, 3, 5]
    for output in outputs:
        assert output.output_ids == [*range(97, 97 + len(output.text))]
        assert output.output_logprobs == scored(output.output_ids)


def test_what_fails_while_nobody_reads_ends_its_request_at_once_and_no_other(
    engine: Engine, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, push = [], Detokenizer.push

    def fails(self: Detokenizer, ids: list[int]) -> str:
        pushed.append(self)
        if self is pushed[0] and pushed.count(self) == 3:
            raise ValueError("scripted")
        return push(self, ids)

    async def scenario() -> tuple[float, list[Output]]:
        before = (await idle(engine))["generation_tokens_total"]
        monkeypatch.setattr(Detokenizer, "push", fails)
        stream = engine.generate_stream(request(max_new_tokens=450))
        async with contextlib.aclosing(stream) as broken:
            await anext(broken)
            others = await collect(engine, request("other", max_new_tokens=30))
            generated = (await idle(engine))["generation_tokens_total"] - before
            with pytest.raises(ValueError, match="scripted"):
                async for _ in broken:
                    pass
        return generated, others

    generated, others = asyncio.run(scenario())
    assert pushed.count(pushed[0]) == 3 and len(set(map(id, pushed))) == 2
    assert generated < 300, "it went on"
    assert others[-1].text == text_of("other", 30)
    assert [m.stopped for m in sent if isinstance(m, Abort)] == [True]


def test_who_leaves_without_reading_the_end_counts_as_what_it_was() -> None:
    ends: list[Any] = []

    class Watching:
        def received(self, request: GenerateRequest, submit: Submit) -> None: ...

        def ended(self, request: GenerateRequest, rid: str, output: Output | None) -> None:
            ends.append(output)

    async def scenario(engine: Engine) -> None:
        outputs: AsyncGenerator[Output, None] = engine.generate_stream(request(max_new_tokens=20))
        async with contextlib.aclosing(outputs):
            await anext(outputs)
            await idle(engine)
        assert not engine._client.left and not engine._client.routes

    with start_metered() as engine:
        engine.request_log._reporters.append(Watching())
        asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    assert shown["num_requests_total/true"] == 1 and shown["num_aborted_requests_total"] == 0
    assert shown["generation_tokens_total/true"] == 20
    assert [(end.finish.type, end.completion_tokens) for end in ends] == [("length", 20)]
