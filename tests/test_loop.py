"""The tick: its order at every depth, what a failure costs, what an idle loop does."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from fake_engine import ScriptedRunner, continuation, make_loop, make_scheduler

from jserve.engine.addresses import Addresses
from jserve.engine.channel import ApiEnd, EngineEnd
from jserve.engine.local import local_ends
from jserve.engine.loop import Loop
from jserve.engine.step_log import StepLog, line_form
from jserve.types import (
    Abort,
    CompiledSpec,
    Control,
    ControlReply,
    Delta,
    Deltas,
    Gauges,
    GrammarSpec,
    SamplingParams,
    Submit,
)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.02)


class Rig:
    """A loop with its API end, ticked by hand."""

    def __init__(self, depth: int = 1, **options: Any) -> None:
        self.api: ApiEnd
        engine_end: EngineEnd
        self.api, engine_end = local_ends()
        self.runner = ScriptedRunner()
        self.scheduler = options.pop("scheduler", None) or make_scheduler(depth)
        self.loop: Loop = make_loop(
            engine_end, self.runner, depth, scheduler=self.scheduler, **options
        )
        self.deltas: dict[str, list[Delta]] = {}
        self.other: list[Any] = []

    def submit(
        self, rid: str, prompt: list[int], count: int, stream: bool = True, **more: Any
    ) -> None:
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
        self.api.send(Submit(rid=rid, prompt_ids=prompt, sampling=sampling, stream=stream, **more))

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.tick()
            self.receive()

    def receive(self) -> None:
        for message in self.api.drain():
            if isinstance(message, Deltas):
                for delta in message.items:
                    self.deltas.setdefault(delta.rid, []).append(delta)
            else:
                self.other.append(message)

    def run_until_finished(self, *rids: str) -> None:
        for _ in range(500):
            self.tick()
            if all(self.finish(rid) for rid in rids):
                return
        raise AssertionError(f"unfinished after 500 ticks: {self.deltas.keys()}")

    def finish(self, rid: str) -> Any:
        return next((d.finish for d in self.deltas.get(rid, []) if d.finish), None)

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.token_ids]


def test_every_steady_tick_plans_and_launches_the_next_step_before_it_reads_the_last() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3], 20)
    rig.tick()  # fills the queue
    events, plan = rig.runner.events, rig.scheduler.plan

    def recorded_plan() -> Any:
        made = plan()
        events.append(("plan", made.step if made else -1))
        return made

    rig.scheduler.plan = recorded_plan  # type: ignore[method-assign]
    for n in range(12):
        events.clear()
        rig.tick()
        expected = [("plan", n + 1), ("launch", n + 1), ("read", n), ("finish", n + 1)]
        assert events == expected


def test_without_overlap_every_step_is_read_in_the_tick_that_launched_it() -> None:
    rig = Rig(depth=0)
    rig.submit("a", [1, 2, 3], 6)
    for n in range(6):
        rig.runner.events.clear()
        rig.tick()
        assert rig.runner.events == [("launch", n), ("finish", n), ("read", n)]
    assert rig.tokens("a") == continuation([1, 2, 3], 6)
    assert rig.finish("a").type == "length"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_are_those_of_one_request_at_a_time_at_every_depth(depth: int) -> None:
    rig = Rig(depth)
    random = np.random.default_rng(depth)
    prompts = {f"r{i}": random.integers(0, 256, 3 + 17 * i).tolist() for i in range(9)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        rig.submit(rid, prompt, 5 + 3 * i)
        rig.tick(i % 3)
    rig.run_until_finished(*prompts)
    for i, (rid, prompt) in enumerate(prompts.items()):
        assert rig.tokens(rid) == continuation(prompt, 5 + 3 * i), rid
    rig.tick(3)
    assert rig.scheduler.idle
    rig.scheduler.check_integrity()


def test_deltas_of_step_n_leave_before_the_head_of_the_next_is_dispatched() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3], 20)
    rig.tick(3)
    sent: list[int] = []
    finish = rig.runner.finish

    def recorded_finish(flight: Any, mask: Any = None) -> None:
        rig.receive()
        sent.append(len(rig.tokens("a")))
        finish(flight, mask)

    rig.runner.finish = recorded_finish  # type: ignore[method-assign]
    rig.tick(2)
    assert sent == [3, 4]


def test_masks_are_asked_for_after_commit_and_handed_to_the_head() -> None:
    order: list[str] = []

    def masks(plan: Any) -> np.ndarray:
        order.append("masks")
        return np.full((1, 8), -1, np.int32)

    rig = Rig(masks=masks)
    grammar = CompiledSpec(spec=GrammarSpec(kind="regex", text="a"), payload=b"")
    rig.submit("a", [1], 8, grammar=grammar)
    commit = rig.scheduler.commit
    finish = rig.runner.finish
    rig.scheduler.commit = lambda *a: order.append("commit") or commit(*a)  # type: ignore
    rig.runner.finish = lambda flight, mask: order.append(f"finish {mask.shape}") or finish(flight)  # type: ignore
    rig.tick(3)
    assert order[2:] == ["commit", "masks", "finish (1, 8)"] * 2


@pytest.mark.parametrize("name", ["launch", "read", "finish"])
def test_a_failed_step_resets_once_and_requests_go_on_with_the_tokens_they_have(name: str) -> None:
    rig = Rig()
    rig.runner.fail = {(name, 4)}
    rig.submit("a", [1, 2, 3], 12)
    rig.submit("b", [9] * 30, 12)
    rig.run_until_finished("a", "b")
    assert ("reset", -1) in rig.runner.events
    assert rig.tokens("a") == continuation([1, 2, 3], 12)
    assert rig.tokens("b") == continuation([9] * 30, 12)
    rig.tick(3)
    rig.scheduler.check_integrity()


def test_a_second_failure_ends_the_loop() -> None:
    rig = Rig()
    rig.runner.fail = {("launch", 3), ("launch", 6)}
    rig.submit("a", [1, 2, 3], 50)
    with pytest.raises(RuntimeError, match="scripted failure of launch"):
        rig.loop.run(lambda: None)
    assert rig.runner.events.count(("reset", -1)) == 1
    assert rig.runner.closed


def test_a_request_that_cannot_run_is_answered_and_the_others_run_on() -> None:
    rig = Rig(scheduler=make_scheduler(max_queued=1))
    rig.submit("good", [1], 2)
    rig.tick()
    rig.submit("long", [1] * 600, 2)
    rig.submit("waits", [1], 2)
    rig.submit("full", [1], 2)
    rig.run_until_finished("good", "long", "waits", "full")
    assert rig.finish("long").type == "abort"
    assert rig.finish("long").status_code == 400 and "600" in rig.finish("long").message
    assert rig.finish("full").status_code == 503
    assert rig.finish("full").message == "The request queue is full."
    assert rig.finish("waits").type == rig.finish("good").type == "length"


def test_our_own_error_in_submit_costs_only_that_request() -> None:
    rig = Rig()
    submit = rig.scheduler.submit

    def broken(message: Submit) -> None:
        if message.rid == "bad":
            raise ZeroDivisionError("ours")
        submit(message)

    rig.scheduler.submit = broken  # type: ignore[method-assign]
    rig.submit("bad", [1], 2)
    rig.submit("good", [1], 2)
    rig.run_until_finished("bad", "good")
    assert rig.finish("bad").status_code == 500 and "ours" in rig.finish("bad").message
    assert rig.finish("good").type == "length"


def test_an_abort_ends_a_running_and_a_waiting_request_and_frees_their_pages() -> None:
    rig = Rig(scheduler=make_scheduler(num_slots=1))
    rig.submit("x1", [1] * 10, 400)
    rig.submit("x2", [2] * 10, 400)
    rig.tick(5)
    assert len(rig.tokens("x1")) == 4 and "x2" not in rig.deltas
    rig.api.send(Abort(rid="x", exact=False))
    rig.run_until_finished("x1", "x2")
    assert rig.finish("x1").type == rig.finish("x2").type == "abort"
    rig.tick(3)
    assert rig.scheduler.idle
    rig.scheduler.check_integrity()
    assert rig.scheduler.stats()["num_used_tokens"] == 0


def test_questions_are_answered_once_and_flush_waits_for_what_is_in_flight() -> None:
    rig = Rig()
    rig.submit("a", [1] * 20, 4)
    rig.run_until_finished("a")
    assert rig.scheduler.stats()["kv_evictable_tokens"] > 0
    for op in ("flush_cache", "server_info", "nonsense"):
        rig.api.send(Control(id=op, op=op))
    rig.tick(2)
    replies = {m.id: m for m in rig.other if isinstance(m, ControlReply)}
    assert replies["flush_cache"].ok
    assert replies["server_info"].payload["context_length"] == 512
    assert replies["server_info"].payload["kv_evictable_tokens"] == 0
    assert not replies["nonsense"].ok and "nonsense" in replies["nonsense"].message
    rig.runner.fail = {("read", 6)}
    rig.submit("b", [1] * 20, 100)
    rig.tick(2)
    for id in ("fails", "busy"):  # the first reads a launch, which fails
        rig.api.send(Control(id=id, op="flush_cache"))
        rig.tick(2)
    assert rig.runner.events.count(("reset", -1)) == 1
    replies = {m.id: m for m in rig.other if isinstance(m, ControlReply)}
    assert not replies["fails"].ok and not replies["busy"].ok
    rig.run_until_finished("b")
    assert rig.tokens("b") == continuation([1] * 20, 100)


def test_an_idle_loop_checks_integrity_and_tells_its_gauges() -> None:
    rig = Rig()
    checked: list[bool] = []
    rig.scheduler.check_integrity = lambda: checked.append(True)  # type: ignore[method-assign]
    rig.api.send(Control(id="1", op="server_info"))
    rig.tick()
    assert checked
    gauges = [m for m in rig.other if isinstance(m, Gauges)]
    assert gauges[-1].values["num_running_reqs"] == 0
    assert gauges[-1].values["gen_throughput"] == 0
    assert gauges[-1].values["recompiles_total"] == 0


def test_shutdown_ends_run_without_waiting_for_work() -> None:
    rig = Rig()
    rig.submit("a", [1], 400)
    thread = threading.Thread(target=rig.loop.run, args=(lambda: None,))
    thread.start()
    rig.api.send(Control(id="bye", op="shutdown"))
    thread.join(5)
    assert not thread.is_alive() and rig.runner.closed


def test_the_watchdog_reports_a_step_that_hangs_and_not_a_loop_that_rests(
    capfd: pytest.CaptureFixture[str],
) -> None:
    api, engine_end = local_ends()
    hung = threading.Event()
    loop = make_loop(engine_end, ScriptedRunner(0.7), watchdog_timeout=0.2)
    thread = threading.Thread(target=loop.run, args=(hung.set,), daemon=True)
    thread.start()
    assert not hung.wait(0.5)
    sampling = SamplingParams(max_new_tokens=1)
    api.send(Submit(rid="a", prompt_ids=[1], sampling=sampling))
    assert hung.wait(2)
    assert "in launch" in capfd.readouterr().err
    api.send(Control(id="bye", op="shutdown"))
    thread.join(5)


def test_the_soft_watchdog_only_logs_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    api, engine_end = local_ends()
    hung = threading.Event()
    runner = ScriptedRunner(0.7)
    loop = make_loop(engine_end, runner, watchdog_timeout=30.0, soft_watchdog_timeout=0.2)
    thread = threading.Thread(target=loop.run, args=(hung.set,), daemon=True)
    thread.start()
    api.send(Submit(rid="a", prompt_ids=[1], sampling=SamplingParams(max_new_tokens=2)))
    deadline, deltas = time.monotonic() + 10, []
    while not any(d.finish for d in deltas) and time.monotonic() < deadline:
        api.wait(1.0)
        deltas += [d for m in api.drain() if isinstance(m, Deltas) for d in m.items]
    assert deltas and deltas[-1].finish is not None and deltas[-1].finish.type == "length"
    api.send(Control(id="bye", op="shutdown"))
    thread.join(5)
    dumps = capfd.readouterr().err.count("in launch")
    assert dumps == 2 and not hung.is_set()  # one a step that hung


def test_log_lines_have_the_fields_that_tools_parse(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jserve.engine")
    rig = Rig()
    rig.submit("a", [1] * 20, 100)
    rig.run_until_finished("a")
    rig.submit("b", [1] * 20, 2)
    rig.run_until_finished("b")
    lines = [record.getMessage() for record in caplog.records]
    prefill = [line for line in lines if line.startswith("Prefill batch")]
    assert "#new-seq: 1, #new-token: 20, #cached-token: 0, token usage: 0." in prefill[0]
    assert "#new-token: 4, #cached-token: 16" in prefill[1]
    assert all("#running-req: " in line and "#queue-req: " in line for line in prefill)
    decode = [line for line in lines if line.startswith("Decode batch")]
    assert len(decode) == 2  # 99 decode steps
    assert "cuda graph: False" in decode[0] and "token usage: 0." in decode[0]
    caplog.clear()
    rig = Rig(decode_log_interval=10)
    rig.submit("a", [1] * 20, 100)
    rig.run_until_finished("a")
    decode = [one for one in caplog.messages if one.startswith("Decode batch")]
    assert len(decode) == 9
    assert "#running-req: 1, #token: " in decode[0] and "gen throughput (token/s): " in decode[0]


def test_lines_of_ranks_begin_with_whose_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Of several in one process each line has its own; in a process of its own, all have one."""
    caplog.set_level(logging.INFO, "jserve.engine")
    scheduler = make_scheduler(1)
    scheduler.submit(Submit(rid="a", prompt_ids=[1] * 4, sampling=SamplingParams()))
    plan = scheduler.plan()
    assert plan is not None
    StepLog(scheduler, page_size=4, interval=1, rank=1).step(plan, time.monotonic())
    (record,) = caplog.records
    logging.getLogger("jserve.engine").info("another")
    other = caplog.records[-1]
    lines = [(line_form(rank).format(record), line_form(rank).format(other)) for rank in (None, 2)]
    times = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for (own, shared), whose in zip(lines, ("", " DP2"), strict=True):
        assert re.match(times + r" DP1\] Prefill batch, #new-seq: 1", own), own
        assert re.fullmatch(times + whose + r"\] another", shared), shared


def throughputs(caplog: pytest.LogCaptureFixture, kind: str) -> list[float]:
    lines = [one for one in caplog.messages if one.startswith(kind)]
    return [float(re.findall(r"throughput \(token/s\): ([\d.]+)", line)[0]) for line in lines]


@pytest.mark.parametrize("depth", [0, 1])
def test_throughput_is_that_of_the_steps_however_long_the_engine_rested(
    caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    """A launch takes 20 ms, and nothing else any time: tokens / 20 ms, or 40 for the first step
    under overlap, which is read when the next is launched."""
    caplog.set_level(logging.INFO, "jserve.engine")
    rig = Rig(depth, decode_log_interval=10)
    rig.runner._step_seconds = 0.02
    for prompt in ([1] * 100, [2] * 100):  # chunks of 64 and 36
        rig.tick(2)
        time.sleep(1.5)  # no work: counted, it would make 0.01 and 0.12 of the shares below
        rig.submit("a", prompt, 12)
        rig.run_until_finished("a")
        rig.deltas.clear()
    first = 64 / 0.02 / (1 + depth)
    prefill = throughputs(caplog, "Prefill batch")
    shares = [got / want for got, want in zip(prefill, (first, 36 / 0.02) * 2, strict=True)]
    assert all(0.05 < share < 1.1 for share in shares), prefill  # a busy machine sleeps longer
    decode = throughputs(caplog, "Decode batch")
    assert len(decode) == 2  # of 22 steps; the prompts' come on top
    assert all(0.15 < rate * 0.02 < 1.1 for rate in decode), decode


def test_messages_cross_processes_in_order_and_wake_the_one_who_waits() -> None:
    addresses = Addresses.create()
    api, engine = addresses.api_end(), addresses.engine_end()
    sampling = SamplingParams(stop=("x",), logit_bias={3: -1.5}, sampling_seed=-(2**63))
    sent = [Submit(rid=str(i), prompt_ids=list(range(i)), sampling=sampling) for i in range(100)]
    for message in sent:
        api.send(message)
    received: list[Any] = []
    while len(received) < 100:
        engine.wait(5.0)
        received += engine.drain()
    assert received == sent
    started = time.monotonic()
    threading.Timer(0.1, engine.send, (Deltas(items=[Delta(rid="a", token_ids=[1])]),)).start()
    api.wait(5.0)
    assert time.monotonic() - started < 3
    assert api.drain() == [Deltas(items=[Delta(rid="a", token_ids=[1])])]
    engine.close()
    api.close()
