"""The prefix that the prompts of a batch share is computed once, before them; and what comes
meanwhile is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import PAGE, ByteTokenizer, ScriptedRunner, continuation, make_loop

from jserve.engine.engine import Engine
from jserve.engine.loop import Loop
from jserve.engine.warm_up import shared_prefixes
from jserve.errors import QueueFullError, RequestError
from jserve.plan import StepPlan
from jserve.server.app import create_app
from jserve.types import Abort, GenerateRequest, LogprobParams, Output, SamplingParams, Submit

PREFIX = "the same beginning of every prompt " * 5
TAILS = [f"and tail number {i}" for i in range(5)]
SHARED = len(PREFIX + "and tail number ") // PAGE * PAGE


class CountingRunner(ScriptedRunner):
    """Counts prompt tokens as they are computed; a step takes a millisecond."""

    latest: CountingRunner
    warm: CountingRunner  # warm_engine's

    def __init__(self) -> None:
        super().__init__(0.001)
        self.prompt_tokens = 0
        self.on_launch: Callable[[], None] = lambda: None
        CountingRunner.latest = self

    def launch(self, plan: StepPlan) -> Any:
        self.prompt_tokens += int((plan.token_ids >= 0).sum())
        self.on_launch()
        return super().launch(plan)


def build(config: Any, channel: Any) -> Loop:
    return make_loop(channel, CountingRunner())


def start(**flags: Any) -> Engine:
    return Engine(
        model_path="fake",
        inline=True,
        builder="test_batch_warmup:build",
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        **flags,
    )


@pytest.fixture(scope="module")
def warm_engine() -> Iterator[Engine]:
    with start() as engine:
        CountingRunner.warm = CountingRunner.latest
        yield engine


@pytest.fixture
def engine(warm_engine: Engine) -> Engine:
    wait_idle(warm_engine)
    CountingRunner.warm.prompt_tokens = 0
    CountingRunner.warm.on_launch = lambda: None
    return warm_engine


@pytest.fixture
def submits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    """What is submitted from here on."""
    messages: list[Submit] = []
    send = engine._client.send

    def watch(message: Any) -> None:
        if isinstance(message, Submit):
            messages.append(message)
        send(message)

    monkeypatch.setattr(engine._client, "send", watch)
    return messages


def wait_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 3
    while not engine.flush_cache():
        assert time.monotonic() < deadline, "a request is still running"
        time.sleep(0.005)
    assert not engine._client.routes


def answers(prompts: list[str], count: int) -> list[str]:
    return [bytes(continuation(list(prompt.encode()), count)).decode() for prompt in prompts]


def requests(prompts: list[str], **fields: Any) -> list[GenerateRequest]:
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
    return [
        GenerateRequest(text=prompt, sampling=sampling, rid=f"b_{i}", **fields)
        for i, prompt in enumerate(prompts)
    ]


async def collect(engine: Engine, batch: list[GenerateRequest]) -> list[Output]:
    async with contextlib.aclosing(engine.generate_batch(batch)) as outputs:
        return [output async for output in outputs]


def test_the_shared_prefix_of_a_batch_is_computed_once(
    engine: Engine, submits: list[Submit]
) -> None:
    prompts = [PREFIX + tail for tail in TAILS]
    bodies = engine.generate(prompts, {"max_new_tokens": 3, "temperature": 0})
    assert [body["text"] for body in bodies] == answers(prompts, 3)
    own = sum(len(prompt) - SHARED for prompt in prompts)
    assert CountingRunner.warm.prompt_tokens == SHARED + own
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [SHARED] * 5
    warm_up, *rest = submits
    assert warm_up.sampling.max_new_tokens == 0 and len(warm_up.prompt_ids) == SHARED
    assert [submit.sampling.max_new_tokens for submit in rest] == [3] * 5


def test_token_ids_and_streams_are_warmed_too(engine: Engine, submits: list[Submit]) -> None:
    prompts = [list((PREFIX + tail).encode()) for tail in TAILS]
    last: dict[int, list[int]] = {}
    for chunk in engine.generate(input_ids=prompts, sampling_params={"n": 2}, stream=True):
        last[chunk["index"]] = chunk["output_ids"]
    expected = [continuation(prompt, 128) for prompt in prompts for _ in range(2)]
    assert [last[index] for index in sorted(last)] == expected
    lengths = [len(s.prompt_ids) for s in submits if s.sampling.max_new_tokens == 0]
    assert lengths == [SHARED, *map(len, prompts)]  # then each prompt, for its own sequences
    assert CountingRunner.warm.prompt_tokens < SHARED + 5 * 2 * 24


def test_nothing_is_warmed_that_is_not_shared_long_or_reusable(
    engine: Engine, submits: list[Submit]
) -> None:
    scored = {"return_logprob": True, "logprob_start_len": 0}
    for prompts, options in (
        (["x" * 100, "y" * 100], {}),
        (["z" * 60 + "one", "z" * 60 + "two"], {}),
        ([PREFIX + "one"], {}),
        ([PREFIX + "one", PREFIX + "two"], scored),
        ([PREFIX + "one", PREFIX + "two"], {"extra_key": ["a", "b"]}),
        ([PREFIX + "one", PREFIX + "two"], {"cache_salt": ["a", None]}),
    ):
        submits.clear()
        engine.generate(prompts, {"max_new_tokens": 2}, **options)
        assert [submit.sampling.max_new_tokens for submit in submits] == [2] * len(prompts)
        wait_idle(engine)


def test_each_namespace_warms_its_own_and_no_other(engine: Engine, submits: list[Submit]) -> None:
    prompts = [PREFIX + tail for tail in TAILS[:4]]
    bodies = engine.generate(prompts, {"max_new_tokens": 2}, extra_key=["a", "b", "a", "b"])
    assert [(s.extra_key, s.sampling.max_new_tokens) for s in submits[:2]] == [("a", 0), ("b", 0)]
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [SHARED] * 4
    own = sum(len(prompt) - SHARED for prompt in prompts)
    assert CountingRunner.warm.prompt_tokens == 2 * SHARED + own


def test_without_a_prefix_cache_there_is_no_warm_up() -> None:
    with start(disable_radix_cache=True) as engine:
        sent: list[Any] = []
        send = engine._client.send
        engine._client.send = lambda m: (sent.append(m), send(m))  # type: ignore[method-assign]
        engine.generate([PREFIX + "a", PREFIX + "b"], {"max_new_tokens": 2})
        engine.generate(PREFIX, {"max_new_tokens": 2, "n": 3})
    assert [m.sampling.max_new_tokens for m in sent if isinstance(m, Submit)] == [2] * 5


def make(ids: list[int], rid: str = "r", **fields: Any) -> Submit:
    return Submit(rid=rid, prompt_ids=ids, sampling=SamplingParams(), **fields)


def test_a_prefix_is_whole_pages_within_what_every_prompt_can_reuse() -> None:
    def lengths(submits: list[Submit], page_size: int = 16) -> list[int]:
        return [len(one.prompt_ids) for one in shared_prefixes(submits, page_size)]

    ids = list(range(200))
    assert lengths([make(ids), make(ids)]) == [192]
    assert lengths([make(ids[:192]), make(ids[:192])]) == [176]  # its last token is computed
    assert lengths([make(ids), make([*ids[:100], 0])]) == [96]
    assert lengths([make(ids), make([*ids[:79], 0])]) == [64]
    assert lengths([make(ids), make([*ids[:63], 0])], page_size=1) == []
    assert lengths([make(ids), make([*ids[:64], 0])], page_size=1) == [64]
    scored = LogprobParams(start_len=80)
    assert lengths([make(ids), make(ids, logprobs=scored)]) == [80]
    assert lengths([make(ids), make(ids, logprobs=LogprobParams(start_len=3))]) == []
    assert lengths([make(ids), make(ids), make(ids, logprobs=LogprobParams(start_len=3))]) == [192]
    (prefix,) = shared_prefixes(
        [make(ids, "abc-1", extra_key="k"), make(ids, "abc-2", extra_key="k")], 16
    )
    assert prefix.rid.startswith("abc-_") and prefix.extra_key == "k"


def test_a_bad_prompt_is_refused_before_anything_starts(
    engine: Engine, submits: list[Submit]
) -> None:
    with pytest.raises(RequestError, match="text must hold"):
        engine.generate([PREFIX + "a", PREFIX + "b", ""], {"max_new_tokens": 2})
    assert not submits


def test_a_refused_warm_up_is_the_answer_of_the_batch(engine: Engine) -> None:
    def full(*_: Any) -> None:
        raise QueueFullError("The request queue is full.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jserve.scheduler.scheduler.Scheduler.submit", full)
        for prompts, n in (([PREFIX + "a", PREFIX + "b"], 1), (PREFIX, 3)):
            with pytest.raises(QueueFullError):
                engine.generate(prompts, {"max_new_tokens": 2, "n": n})
    wait_idle(engine)
    assert engine.generate("a", {"max_new_tokens": 2})["text"] == answers(["a"], 2)[0]


def during_warm_up(act: Callable[[], None]) -> threading.Event:
    """Run `act` in the engine's first step, and wait a little for what it sends."""
    done = threading.Event()

    def once() -> None:
        if not done.is_set():
            done.set()
            act()
            time.sleep(0.05)

    CountingRunner.warm.on_launch = once
    return done


@pytest.mark.parametrize(
    ("rid", "abort_all", "aborted"),
    [("b_1", False, [1]), ("b_", False, [0, 1, 2]), ("", True, [0, 1, 2]), ("c", False, [])],
)
def test_an_abort_during_the_warm_up_reaches_those_that_wait(
    engine: Engine, submits: list[Submit], rid: str, abort_all: bool, aborted: list[int]
) -> None:
    fired = during_warm_up(lambda: engine.abort(rid, abort_all))
    prompts = [PREFIX + tail for tail in TAILS[:3]]
    outputs = {output.index: output for output in asyncio.run(collect(engine, requests(prompts)))}
    assert fired.is_set() and submits[0].sampling.max_new_tokens == 0
    for index, expected in enumerate(answers(prompts, 6)):
        finish = outputs[index].finish
        assert finish is not None
        assert (finish.type == "abort") is (index in aborted)
        assert outputs[index].text == ("" if index in aborted else expected)
    wait_idle(engine)


@pytest.mark.parametrize(("rid", "aborted"), [("r", [0, 1, 2]), ("r_1", [1])])
def test_an_abort_during_the_warm_up_of_n_sequences_reaches_them(
    engine: Engine, submits: list[Submit], rid: str, aborted: list[int]
) -> None:
    fired = during_warm_up(lambda: engine.abort(rid))
    bodies = engine.generate(PREFIX, {"max_new_tokens": 6, "n": 3}, rid="r")
    assert fired.is_set() and submits[0].sampling.max_new_tokens == 0
    kinds = [body["meta_info"]["finish_reason"]["type"] for body in bodies]
    assert kinds == ["abort" if index in aborted else "length" for index in range(3)]
    wait_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_during_the_warm_up_ends_it_and_starts_nothing(
    engine: Engine, submits: list[Submit], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    prompts = [PREFIX + tail for tail in TAILS] if n == 1 else [PREFIX]
    sampling = SamplingParams(max_new_tokens=300, n=n)
    batch = [GenerateRequest(text=prompt, sampling=sampling) for prompt in prompts]
    sent: list[Any] = []
    send = engine._client.send
    monkeypatch.setattr(engine._client, "send", lambda m: (sent.append(m), send(m)))

    async def leave() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        during_warm_up(lambda: loop.call_soon_threadsafe(started.set))
        task = asyncio.create_task(collect(engine, batch))
        await started.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    (warm_up,) = [m for m in sent if isinstance(m, Submit)]
    assert [m.rid for m in sent if isinstance(m, Abort)] == [warm_up.rid]
    wait_idle(engine)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_list_of_prompts_over_http_is_warmed(
    engine: Engine, submits: list[Submit], path: str
) -> None:
    prompts = [PREFIX + tail for tail in TAILS]
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": 3, "temperature": 0}
    if path == "/generate":
        body = {"text": prompts, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}

    async def post() -> Any:
        transport = httpx.ASGITransport(create_app(engine, engine.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.post(path, json=body)

    answer = asyncio.run(post()).json()
    answered = answer if path == "/generate" else answer["choices"]
    assert [one["text"] for one in answered] == answers(prompts, 3)
    assert [submit.sampling.max_new_tokens for submit in submits] == [0, *[3] * 5]
    own = sum(len(prompt) - SHARED for prompt in prompts)
    assert CountingRunner.warm.prompt_tokens == SHARED + own
