"""Metrics: names, labels and buckets are SGLang's, and every one moves as computed by hand."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import prometheus_client
import pytest
from fake_engine import PAGE, ByteTokenizer, ScriptedRunner, make_loop, make_scheduler
from fake_server_engine import Api
from prometheus_client.parser import text_string_to_metric_families

from jserve.cache.manager import CacheManager
from jserve.engine.engine import Engine
from jserve.engine.local import local_ends
from jserve.metrics import Metrics
from jserve.metrics.boundary import boundaries
from jserve.metrics.families import FAMILIES, histograms
from jserve.metrics.histogram import Histogram, numbers
from jserve.metrics.step_clock import StepClock, step_timing
from jserve.plan import StepPlan
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import (
    CompiledSpec,
    Control,
    Delta,
    Deltas,
    FinishReason,
    Gauges,
    GenerateRequest,
    GrammarSpec,
    Output,
    SamplingParams,
    Submit,
    Times,
)

REQUEST = {"model_name", "engine_type"}
SCHEDULER = REQUEST | {"tp_rank", "pp_rank", "moe_ep_rank"}
CACHE = {"cache_type", "tp_rank", "pp_rank", "dp_rank"}
#: Rows of the contract's table that are marked S and whose feature is there: name, type, labels.
ROWS = (
    ("cached_tokens_total", "counter", REQUEST | {"cache_source"}),
    ("evicted_tokens_total", "counter", CACHE),
    ("generation_tokens_total", "counter", REQUEST | {"is_streaming"}),
    ("num_aborted_requests_total", "counter", REQUEST),
    ("num_requests_total", "counter", REQUEST | {"is_streaming"}),
    ("num_retracted_requests_total", "counter", SCHEDULER),
    ("prefill_effective_tokens_total", "counter", SCHEDULER | {"mode"}),
    ("prompt_tokens_total", "counter", REQUEST | {"is_streaming"}),
    ("realtime_tokens_total", "counter", SCHEDULER | {"mode"}),
    ("cache_hit_rate", "gauge", SCHEDULER),
    ("gen_throughput", "gauge", SCHEDULER),
    ("is_cuda_graph", "gauge", SCHEDULER),
    ("kv_available_tokens", "gauge", SCHEDULER),
    ("kv_evictable_tokens", "gauge", SCHEDULER),
    ("kv_used_tokens", "gauge", SCHEDULER),
    ("max_total_num_tokens", "gauge", SCHEDULER),
    ("new_token_ratio", "gauge", SCHEDULER),
    ("num_paused_reqs", "gauge", SCHEDULER),
    ("num_queue_reqs", "gauge", SCHEDULER),
    ("num_retracted_reqs", "gauge", SCHEDULER),
    ("num_running_reqs", "gauge", SCHEDULER),
    ("num_used_tokens", "gauge", SCHEDULER),
    ("token_usage", "gauge", SCHEDULER),
    ("utilization", "gauge", SCHEDULER),
    ("e2e_request_latency_seconds", "histogram", REQUEST | {"is_streaming"}),
    ("eviction_duration_seconds", "histogram", CACHE),
    ("generation_tokens_histogram", "histogram", REQUEST),
    ("inter_token_latency_seconds", "histogram", REQUEST),
    ("per_stage_req_latency_seconds", "histogram", SCHEDULER | {"stage"}),
    ("prompt_tokens_histogram", "histogram", REQUEST),
    ("queue_time_seconds", "histogram", SCHEDULER),
    ("request_time_per_output_token_seconds", "histogram", REQUEST | {"is_streaming"}),
    ("time_to_first_token_seconds", "histogram", REQUEST | {"is_streaming"}),
    ("uncached_prompt_tokens_histogram", "histogram", REQUEST),
)


class Rig:
    """A loop ticked by hand, and what its gauges say: values and histograms by series."""

    def __init__(self, scheduler: Scheduler | None = None, **options: Any) -> None:
        self.api, end = local_ends()
        self.scheduler = scheduler or make_scheduler(timing=step_timing())
        self.runner = ScriptedRunner()
        self.loop = make_loop(end, self.runner, scheduler=self.scheduler, **options)
        self.deltas: list[Delta] = []

    def run(
        self,
        *submits: tuple[str, list[int], int],
        each: Callable[[], None] = bool,
        grammar: CompiledSpec | None = None,
    ) -> None:
        for rid, prompt, count in submits:
            sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
            submit = Submit(rid=rid, prompt_ids=prompt, sampling=sampling, stream=True)
            self.api.send(msgspec.structs.replace(submit, grammar=grammar))
        while True:
            self.loop.tick()
            each()
            if self.scheduler.idle:
                return

    def read(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        self.loop._gauges.rest()
        messages = self.api.drain()
        for message in messages:
            self.deltas += message.items if isinstance(message, Deltas) else []
        latest = [message for message in messages if isinstance(message, Gauges)][-1]
        return latest.values, latest.histograms

    def shown(self, prefix: str = "jserve") -> dict[str, float]:
        """Samples of the exposition, without labels that never change."""
        return samples(Metrics(prefix, "m", self.gauges))

    def gauges(self) -> Gauges:
        values, counts = self.read()
        return Gauges(values=values, histograms=counts)


def samples(metrics: Metrics) -> dict[str, float]:
    shown = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            label = {
                k: v
                for k, v in sample.labels.items()
                if k in ("le", "mode", "stage", "is_streaming", "boundary", "kind", "cache_source")
            }
            shown["/".join((sample.name.partition(":")[2], *label.values()))] = sample.value
    return shown


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.0)
    monkeypatch.setattr("jserve.engine.gauges.INTERVAL", 0.0)


@pytest.mark.parametrize("prefix", ["sglang", "jserve"])
@pytest.mark.parametrize("worked", [False, True])
def test_every_row_of_the_contract_is_shown_with_its_type_and_labels(
    prefix: str, worked: bool
) -> None:
    rig = Rig()
    if worked:
        rig.run(("a", [1] * 20, 4))
    metrics = Metrics(prefix, "m", rig.gauges) if worked else Metrics(prefix, "m")
    text = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, kind, labels in ROWS:
        family = families[f"{prefix}:{name.removesuffix('_total')}"]
        assert family.type == kind, name
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, sample
            assert sample.labels.get("model_name", "m") == "m"
            assert sample.labels.get("is_streaming", "true") in ("true", "false")
    assert f"# TYPE {prefix}:recompiles_total counter" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("time_to_first_token_seconds", (0.1, 0.2, 0.4), 400, 18),
        ("e2e_request_latency_seconds", (0.1, 0.2, 0.4), 2400, 22),
        ("inter_token_latency_seconds", (0.002, 0.004, 0.006), 8, 23),
        ("request_time_per_output_token_seconds", (0.002, 0.004, 0.006), 8, 23),
        ("queue_time_seconds", (0, 0.001, 0.005), 1000, 33),
        ("prompt_tokens_histogram", (100, 300, 500), 1_000_000, 33),
        ("eviction_duration_seconds", (0.001, 0.002, 0.003), 1, 18),
        ("per_stage_req_latency_seconds", (0.001, 0.00162, 0.0026244), 0.001 * 1.62**29, 30),
    ],
)
def test_buckets_are_the_contracts(name: str, first: tuple, last: float, count: int) -> None:
    bounds = FAMILIES[name].bounds
    assert bounds[:3] == pytest.approx(first) and bounds[-1] == pytest.approx(last)
    assert len(bounds) == count and list(bounds) == sorted(set(bounds))


def test_a_histogram_counts_as_prometheus_own() -> None:
    draw, bounds = random.Random(0), FAMILIES["inter_token_latency_seconds"].bounds
    ours, registry = Histogram(bounds), prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "h", registry=registry, buckets=bounds)
    for _ in range(2000):
        value = draw.choice([draw.expovariate(20), draw.choice(bounds)])
        ours.observe(value)
        theirs.observe(value)
    for bound, count in zip(bounds, np.cumsum(ours.counts), strict=False):
        le = prometheus_client.utils.floatToGoString(bound)
        assert registry.get_sample_value("h_bucket", {"le": le}) == count
    assert registry.get_sample_value("h_count") == sum(ours.counts) == 2000
    assert registry.get_sample_value("h_sum") == pytest.approx(ours.total)
    ours.observe(0.5, 3)
    assert sum(ours.counts) == 2003 and numbers({"h": ours})["h"][-1] == ours.total


def test_each_boundary_is_timed_as_often_as_it_was_crossed() -> None:
    """100 prompt tokens in chunks of 64 and 36, then four decode steps for the other tokens."""
    asked: list[int] = []

    def masks(plan: StepPlan) -> np.ndarray | None:
        asked.append(plan.step)
        return np.full((1, 8), -1, np.int32) if plan.step >= 4 else None

    rig = Rig(masks=masks)
    grammar = CompiledSpec(spec=GrammarSpec(kind="regex", text="a"), payload=b"")
    rig.run(("a", list(range(100)), 5), grammar=grammar)
    values, counts = rig.read()
    times = {name: sum(numbers[:-1]) for name, numbers in counts.items()}
    steps = 6
    assert values["steps_total"] == steps and asked == list(range(1, steps))
    for what in ("plan", "launch", "read", "step", "commit"):
        assert times[f"execution_{what}_seconds"] == steps, what
    assert times["output_sample_seconds"] == steps
    assert times["output_mask_seconds"] == 2  # of steps 4 and 5
    assert times["cache_match_seconds"] == times["cache_match_tokens"] == 1
    assert times["cache_allocate_seconds"] == 3  # two chunks, and the page of token 100
    assert times["queue_time_seconds"] == 1
    stages = {k.partition("/")[2]: n for k, n in times.items() if k.startswith("per_stage")}
    assert stages == {"request_process": 1, "chunked_prefill": 1, "prefill_forward": 1}
    for what in ("plan", "launch", "step", "commit"):
        assert 0 < counts[f"execution_{what}_seconds"][-1] < 5
    idle = Rig()
    idle.run()
    assert sum(sum(one) for name, one in idle.read()[1].items() if "plan" in name) == 0


def test_tokens_are_counted_by_origin_and_kind_as_computed_by_hand() -> None:
    rig = Rig()
    rig.run(("a", list(range(100)), 5))
    rig.run(("b", list(range(100)), 3))  # 96 of its tokens are cached
    shown = rig.shown()
    expected = {
        "realtime_tokens_total/prefill_compute": 104,
        "realtime_tokens_total/prefill_cache": 96,
        "realtime_tokens_total/decode": 8,
        "prefill_effective_tokens_total/input": 104,
        "prefill_effective_tokens_total/device_hit": 96,
        "bucket_real_tokens_total/mixed": 104,
        "bucket_real_tokens_total/decode": 6,
        "bucket_padded_tokens_total/mixed": 3 * 64,
        "bucket_padded_tokens_total/decode": 6 * 64,
        "cache_match_tokens_bucket/0.0": 1,
        "cache_match_tokens_bucket/63.0": 1,
        "cache_match_tokens_bucket/127.0": 2,
        "cache_match_tokens_sum": 96,
        "execution_queue_seconds_count": 2,
        "queue_time_seconds_count": 2,
        "recompiles_total": 0,
        "cache_active_references": 0,
        "num_queue_reqs": 0,
        "num_used_tokens": 0,
        "kv_evictable_tokens": 104,
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["cache_hit_rate"] == pytest.approx(96 / 100)


def test_waiting_and_running_requests_are_shown_while_they_are() -> None:
    rig = Rig(make_scheduler(timing=step_timing(), num_slots=1))
    seen: list[dict[str, float]] = []
    names = (
        *("num_running_reqs", "num_queue_reqs", "num_waiting_tokens", "cache_active_references"),
        *("num_used_tokens", "utilization", "num_chunked_tokens"),
    )
    rig.run(
        ("a", list(range(100)), 3),
        ("b", list(range(50, 90)), 3),
        each=lambda: seen.append({name: rig.scheduler.stats()[name] for name in names}),
    )
    first = dict(zip(names, (1, 1, 40, 1, 64, 1.0, 36), strict=True))
    assert seen[0] == first
    assert seen[-1] == dict.fromkeys(names, 0)


def crowded() -> Rig:
    """A pool in which running requests outgrow what admission reserved for them."""
    settings = SchedulerSettings(
        num_slots=8,
        context_length=96,
        page_size=PAGE,
        chunked_prefill_size=8,
        max_prefill_tokens=64,
        vocab_size=256,
        schedule_conservativeness=0.02,
        lookahead=1,
    )
    return Rig(Scheduler(settings, CacheManager(14, PAGE, timing=step_timing())))


def test_counters_and_histograms_only_grow_through_retractions_and_evictions() -> None:
    rig, seen = crowded(), []
    submits = [(f"r{i}", [i + k for k in range(5 + 3 * (i % 5))], 24) for i in range(10)]
    rig.run(*submits, each=lambda: seen.append(rig.read()))
    for (before, counts), (after, later) in itertools.pairwise(seen):
        for name, value in before.items():
            assert not name.endswith("_total") or after[name] >= value, name
        for name, one in counts.items():
            assert all(a >= b for a, b in zip(later[name], one, strict=True)), name
    values, counts = seen[-1]
    assert values["num_retracted_requests_total"] > 0
    assert values["allocator_failures_total"] > 0
    assert values["evicted_tokens_total"] > 0
    assert sum(counts["eviction_duration_seconds"][:-1]) > 0
    assert sum(counts["queue_time_seconds"][:-1]) == 10  # once a request, retracted or not
    assert values["prefill_tokens_total"] > values["uncached_tokens_total"]
    last = {delta.rid: delta for delta in rig.deltas if delta.finish}
    assert len(last) == 10 and any(delta.num_retractions for delta in last.values())
    for delta in last.values():
        assert delta.num_steps >= delta.completion_tokens, "a step gives at most one token"
        assert delta.cache_seconds > 0 and delta.ended >= delta.prefill_finished > 0


def start(tokenizer: Any = None, **flags: Any) -> Engine:
    tokenizer = tokenizer or ByteTokenizer()
    options: dict[str, Any] = {"builder": "fake_engine:build", "enable_metrics": True, **flags}
    return Engine("m", inline=True, tokenizer=tokenizer, **options)


def outputs(engine: Engine, request: GenerateRequest) -> list[Output]:
    async def gather() -> list[Output]:
        return [one async for one in engine.generate_stream(request) if one.finish is not None]

    return asyncio.run(gather())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"stop": ("q", "w", "e")}])
def test_the_four_boundaries_of_a_request_sum_to_its_latency(stream: bool, sampling: dict) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.0, **sampling)
    with start() as engine:
        began = time.time()
        ended = outputs(engine, GenerateRequest(text="hello" * 30, sampling=params, stream=stream))
        seconds = time.time() - began
        shown = samples(engine.metrics)
    assert len(ended) == params.n
    for output in ended:
        spent = boundaries(output.times)
        latency = output.times.latest - output.times.created
        assert list(spent) == ["prompt", "cache", "execution", "output"]
        assert min(spent.values()) >= 0, spent
        assert sum(spent.values()) == pytest.approx(latency, abs=1e-6)
        assert 0 < latency <= seconds
        assert output.times.num_steps >= 3
        assert spent["execution"] > 0.0009 * (output.times.num_steps - 2)  # 1 ms a step
    whole = sum(shown[f"request_boundary_seconds_sum/{name}"] for name in spent)
    label = str(stream).lower()
    assert whole == pytest.approx(shown[f"e2e_request_latency_seconds_sum/{label}"], abs=1e-5)
    assert shown[f"e2e_request_latency_seconds_count/{label}"] == params.n


def test_requests_are_counted_under_their_labels() -> None:
    with start() as engine:
        prompt = list(range(10, 110))
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        for stream in (True, False, False):
            answer = engine.generate(input_ids=prompt, sampling_params=sampling, stream=stream)
            list(answer)
        shown = samples(engine.metrics)
    expected = {
        "num_requests_total/true": 1,
        "num_requests_total/false": 2,
        "num_aborted_requests_total": 0,
        "prompt_tokens_total/false": 200,
        "generation_tokens_total/true": 4,
        "cached_tokens_total/device": 192,
        "uncached_prompt_tokens_histogram_sum": 108,
        "prompt_tokens_histogram_count": 3,
        "generation_tokens_histogram_sum": 12,
        "time_to_first_token_seconds_count/true": 1,
        "time_to_first_token_seconds_count/false": 2,
        "inter_token_latency_seconds_count": 3,  # of the stream: the others have one output
        "request_time_per_output_token_seconds_count/false": 2,
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["output_detokenize_seconds_count"] == 4 + 2


def test_latencies_follow_the_contracts_rules() -> None:
    metrics = Metrics()
    times = Times(created=10.0, sent=10.5, cache=0.25, first_token=11.0, ended=14.0, latest=15.0)
    submit = Submit(rid="a", prompt_ids=[1] * 700, sampling=SamplingParams(), stream=True)
    metrics.meter.first_token(submit, times)
    metrics.meter.tokens(submit, 4, 2.0)
    last = Delta(rid="a", token_ids=[], prompt_tokens=700, cached_tokens=600)
    metrics.meter.finished(submit, FinishReason(type="stop"), last, 5, times)
    shown = samples(metrics)
    assert shown["time_to_first_token_seconds_sum/true"] == 1.0
    assert shown["inter_token_latency_seconds_count"] == 4
    assert shown["inter_token_latency_seconds_sum"] == 2.0
    assert shown["request_time_per_output_token_seconds_sum/true"] == (15 - 11) / 4
    assert shown["e2e_request_latency_seconds_sum/true"] == 5.0
    spent = [shown[f"request_boundary_seconds_sum/{name}"] for name in boundaries(times)]
    assert spent == [0.5, 0.25, 3.25, 1.0]
    assert shown["prompt_tokens_histogram_bucket/700.0"] == 1
    assert shown["prompt_tokens_histogram_bucket/500.0"] == 0


def test_tokenizer_and_template_are_timed() -> None:
    metrics = Metrics()
    source = byte_source(256, templates={"default": "{{ messages[0].content }}"})
    tokenizer = Tokenizer(source, metrics.meter.timing)
    tokenizer.encode("abc")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == list(b"hi")
    shown = samples(metrics)
    assert shown["prompt_tokenize_seconds_count"] == 2
    assert shown["prompt_template_seconds_count"] == 1
    assert 0 < shown["prompt_template_seconds_sum"] < 1


def test_every_event_of_a_stream_is_timed_while_it_is_sent() -> None:
    api = Api(enable_metrics=True)
    events = api.events("/generate", text="abc", sampling_params={"max_new_tokens": 6})
    assert len(events) == 6
    sent = samples(api.engine.metrics)["output_stream_seconds_count"]
    assert sent == 5  # the first goes out with the status


def test_the_clocks_of_a_tick_cost_ten_microseconds_at_most() -> None:
    """Seven watched calls a tick, and the cache's two and a prompt's three observations."""
    clock = StepClock()
    calls = ("plan", "launch", "read", "commit")
    series = [f"execution_{what}_seconds" for what in calls]
    series += ["output_mask_seconds", "output_sample_seconds"]
    watched = [clock.watch(name, lambda: 1) for name in series]
    others = ("cache_match_seconds", "cache_allocate_seconds", "queue_time_seconds")

    def tick() -> None:
        for call in watched:
            call()
        for name in others:
            clock.observe(name, 1e-5)

    best = min(_seconds(tick, 100) for _ in range(100))
    assert sum(clock.histograms["execution_step_seconds"].counts) == 10_000
    assert best <= 10e-6, f"{best * 1e6:.1f} µs"


def test_a_step_lasts_from_its_launch_or_the_end_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock()

    def wait(until: float) -> bool:
        now[0] = until
        return True

    launch = clock.watch("execution_launch_seconds", wait)
    read = clock.watch("execution_read_seconds", wait)
    now[0] = 1.0
    launch(1.25)  # step 0 from 1.0
    launch(2.0)  # step 1 from 1.25
    read(4.0)  # 3 s
    read(4.5)  # 0.5 s: before, the device was at step 0
    steps = clock.histograms["execution_step_seconds"]
    assert (sum(steps.counts), steps.total) == (2, 3.5)
    assert clock.histograms["execution_launch_seconds"].total == 0.25 + 0.75
    assert clock.histograms["execution_read_seconds"].total == 2.0 + 0.5


def test_a_failed_step_leaves_no_trace_in_the_times_of_those_after_it() -> None:
    rig = Rig()
    rig.runner.fail = {("read", 2)}
    rig.run(("a", [1] * 9, 8))
    assert rig.runner.events.count(("reset", -1)) == 1
    _, counts = rig.read()
    reads = sum(counts["execution_read_seconds"][:-1])
    assert reads == sum(counts["execution_step_seconds"][:-1]) == 8  # one a token
    assert counts["execution_step_seconds"][-1] < 5


def test_without_metrics_nothing_is_timed_and_the_engine_still_tells_its_load() -> None:
    with start(enable_metrics=False) as engine:
        engine.generate("abc", {"max_new_tokens": 4})
        deadline = time.monotonic() + 3
        while not engine.gauges.get("num_requests_total") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert engine.gauges["num_requests_total"] == 1
        assert set(engine._client.gauges.histograms) == {"cache_match_tokens"}
        shown = samples(engine.metrics)
    assert shown["num_requests_total/false"] == shown["execution_plan_seconds_count"] == 0
    assert shown["realtime_tokens_total/decode"] == 4


def _seconds(call: Callable[[], None], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def test_the_engines_numbers_arrive_with_its_histograms() -> None:
    rig = Rig()
    rig.api.send(Control(id="1", op="server_info"))
    rig.run(("a", [1] * 9, 3))
    _, counts = rig.read()
    known = set(histograms("scheduler", "cache"))
    assert known == set(counts)
    assert "cache_match_tokens" in known
    for name, one in counts.items():
        bounds = FAMILIES[name.partition("/")[0]].bounds
        assert len(one) == len(bounds) + 2, name
    lengths = FAMILIES["cache_match_tokens"].bounds
    for n in (0, 1, 2, 3, 4, 7, 8, 32_768):  # as the cache counts them
        assert bisect.bisect_left(lengths, n) == n.bit_length()
