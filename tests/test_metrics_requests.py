"""Which requests count, and under which priority: those that ended by themselves, that were aborted
and that their clients left; not those that were refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_engine import ScriptedRunner, make_loop, make_scheduler
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import samples, start

from jserve.config import Config
from jserve.engine.engine import Engine
from jserve.errors import QueueFullError, RequestError
from jserve.metrics.priority import MOST_VALUES, make_mark
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.types import GenerateRequest, Output, SamplingParams

LABELS = ("true", "false")
SERVED = ("num_requests_total", "prompt_tokens_total", "generation_tokens_total")


def request(prompt: str = "hello", count: int = 400, stream: bool = True, **fields: Any) -> Any:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, n=fields.pop("n", 1))
    return GenerateRequest(text=prompt, sampling=sampling, stream=stream, **fields)


async def whole(engine: Engine, one: GenerateRequest) -> list[Output]:
    async with contextlib.aclosing(engine.generate_stream(one)) as outputs:
        return [output async for output in outputs]


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


async def leave_stream(engine: Engine, one: GenerateRequest) -> None:
    async with contextlib.aclosing(engine.generate_stream(one)) as outputs:
        for _ in range(5):
            await anext(outputs)


async def leave_answer(engine: Engine, one: GenerateRequest) -> None:
    task = asyncio.create_task(whole(engine, one))
    await asyncio.sleep(0.1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("stream", "leave"), [(True, leave_stream), (False, leave_answer)])
@pytest.mark.parametrize("n", [1, 2])
def test_who_leaves_counts_with_all_that_was_generated_for_it(
    stream: bool, leave: Callable[..., Awaitable[None]], n: int
) -> None:
    label = str(stream).lower()

    async def scenario(engine: Engine) -> None:
        await leave(engine, request(stream=stream, n=n))
        await until(lambda: not engine._client.left)
        await asyncio.sleep(0.3)  # until the engine has told its totals

    with start() as engine:
        asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    generated = shown[f"generation_tokens_total/{label}"]
    assert shown["num_aborted_requests_total"] == shown[f"num_requests_total/{label}"] == n
    assert 5 <= generated == shown["realtime_tokens_total/decode"] < 800
    assert shown[f"prompt_tokens_total/{label}"] == 5 * n
    assert shown[f"e2e_request_latency_seconds_count/{label}"] == n
    assert 0 < shown[f"e2e_request_latency_seconds_sum/{label}"] < 5 * n
    assert shown[f"time_to_first_token_seconds_count/{label}"] == n
    assert 0 < shown[f"request_time_per_output_token_seconds_sum/{label}"] < n
    assert shown["generation_tokens_histogram_sum"] == generated
    for boundary in ("prompt", "cache", "execution", "output"):
        assert shown[f"request_boundary_seconds_count/{boundary}"] == n
        assert shown[f"request_boundary_seconds_sum/{boundary}"] >= 0


def test_who_leaves_with_the_event_loop_counts_with_what_is_known() -> None:
    with start() as engine:
        asyncio.run(leave_stream(engine, request()))  # the loop ends before the engine knows
        shown = samples(engine.metrics)
        assert not engine._client.left
    assert shown["num_aborted_requests_total"] == shown["num_requests_total/true"] == 1
    assert shown["generation_tokens_total/true"] >= 5


def test_a_stop_regex_that_is_too_slow_ends_its_request_which_counts_as_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_slow(self: Detokenizer, ids: list[int]) -> str:
        raise RequestError("stop_regex is too slow.", "stop_regex")

    async def scenario(engine: Engine) -> None:
        with pytest.raises(RequestError, match="too slow"):
            await whole(engine, request())
        await until(lambda: not engine._client.left)

    with start() as engine:
        monkeypatch.setattr(Detokenizer, "push", too_slow)
        asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    assert shown["num_aborted_requests_total"] == shown["num_requests_total/true"] == 1
    assert shown["generation_tokens_total/true"] >= 1


def test_an_id_is_free_as_soon_as_its_client_has_left() -> None:
    async def scenario(engine: Engine) -> list[Output]:
        for _ in range(20):
            await leave_stream(engine, request(rid="same"))
        last = await whole(engine, request(count=7, rid="same"))
        await until(lambda: not engine._client.left)
        return last

    with start() as engine:
        last = asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    assert last[-1].completion_tokens == 7 and "".join(one.delta for one in last) == last[-1].text
    assert last[-1].finish is not None and last[-1].finish.type == "length"
    assert shown["num_requests_total/true"] == 21 and shown["num_aborted_requests_total"] == 20


def test_an_abort_counts_once_as_a_request_and_once_as_aborted() -> None:
    async def scenario(engine: Engine) -> None:
        task = asyncio.create_task(whole(engine, request(rid="a")))
        await asyncio.sleep(0.05)
        engine.abort("a")
        await task

    with start() as engine:
        asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    assert shown["num_aborted_requests_total"] == shown["num_requests_total/true"] == 1
    assert shown["e2e_request_latency_seconds_count/true"] == 1


def build_narrow(config: Config, channel: Any) -> Any:
    """One slot, one place in the queue."""
    return make_loop(
        channel, ScriptedRunner(0.001), scheduler=make_scheduler(num_slots=1, max_queued=1)
    )


def test_a_refused_request_counts_nowhere() -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(whole(engine, request(count=60, rid="runs")))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(whole(engine, request(count=3, stream=False)))
        await asyncio.sleep(0.02)
        with pytest.raises(QueueFullError):
            await whole(engine, request(stream=False))
        with pytest.raises(RequestError, match="in use"):
            await whole(engine, request(rid="runs"))
        with pytest.raises(RequestError, match="context length"):
            await whole(engine, request("x" * 600))
        await asyncio.gather(running, waiting)

    with start(builder="test_metrics_requests:build_narrow") as engine:
        asyncio.run(scenario(engine))
        shown = samples(engine.metrics)
    assert shown["num_aborted_requests_total"] == 0
    counted = {f"{name}/{label}": shown[f"{name}/{label}"] for name in SERVED for label in LABELS}
    assert counted == {
        "num_requests_total/true": 1,
        "num_requests_total/false": 1,
        "prompt_tokens_total/true": 5,
        "prompt_tokens_total/false": 5,
        "generation_tokens_total/true": 60,
        "generation_tokens_total/false": 3,
    }
    assert shown["e2e_request_latency_seconds_count/false"] == 1
    assert shown["request_boundary_seconds_count/prompt"] == 2


def test_a_request_may_ask_not_to_be_counted() -> None:
    with start() as engine:
        engine.generate("hello", {"max_new_tokens": 4}, log_metrics=False)
        engine.generate("hello", {"max_new_tokens": 4})
        shown = samples(engine.metrics)
    assert shown["num_requests_total/false"] == 1
    assert shown["output_detokenize_seconds_count"] == 1


def by_labels(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(engine.metrics.render().decode()):
        for sample in family.samples:
            if sample.name == f"jserve:{name}":
                labels = [sample.labels.get(key) for key in ("priority", "is_streaming")]
                found[tuple(label for label in labels if label is not None)] = sample.value
    return found


def build_ranked(config: Config, channel: Any) -> Any:
    settings = {"enable_priority_scheduling": True, "num_slots": 2}
    return make_loop(channel, ScriptedRunner(0.001), scheduler=make_scheduler(**settings))


def test_where_priorities_order_the_queue_they_are_a_label() -> None:
    async def scenario(engine: Engine) -> dict[tuple[str, ...], float]:
        priorities = (None, 5, 5, 5, -1)
        tasks = [
            asyncio.create_task(whole(engine, request(count=300, priority=priority)))
            for priority in priorities
        ]
        await until(lambda: engine.gauges.get("num_queue_reqs") == 3)
        waiting = by_labels(engine, "num_queue_reqs")
        engine.abort(abort_all=True)
        await asyncio.gather(*tasks)
        return waiting

    builder = "test_metrics_requests:build_ranked"
    with start(builder=builder, enable_priority_scheduling=True) as engine:
        waiting = asyncio.run(scenario(engine))
        ended = by_labels(engine, "num_requests_total")
        latencies = by_labels(engine, "e2e_request_latency_seconds_count")
        tokens = by_labels(engine, "inter_token_latency_seconds_count")
        usage = by_labels(engine, "token_usage")
    assert waiting[("",)] == 3 == 1 + sum(n for labels, n in waiting.items() if labels != ("",))
    assert waiting[("5",)] == 1 and waiting[("-1",)] == 1  # … and one without
    assert ended == {("", "true"): 1, ("", "false"): 0, ("5", "true"): 3, ("-1", "true"): 1}
    assert latencies == ended
    assert tokens[("5",)] > 0 and set(usage) == {("",)}


def test_without_priorities_there_is_no_such_label() -> None:
    with start() as engine:
        engine.generate("hello", {"max_new_tokens": 4}, priority=3)
        assert set(by_labels(engine, "num_requests_total")) == {("true",), ("false",)}
        assert set(by_labels(engine, "num_queue_reqs")) == {()}


def test_clients_cannot_make_more_series_than_a_few() -> None:
    mark = make_mark(default=7)
    assert mark(None) == mark(7) == "#7" and make_mark()(None) == ""
    marks = {mark(priority) for priority in range(10_000)}
    assert len(marks) == MOST_VALUES + 1 and "#other" in marks
    assert mark(7) == "#7" and mark(9_999) == "#other"
