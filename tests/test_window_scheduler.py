"""The scheduler with a cache whose windowed layers keep little: every step's tokens see their whole
window, rows let go of what they have left, and both pools come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from random_runs import run_rounds
from scripted_runner import Flight, ScriptedRunner, Simulation, prompt, solo, submit
from test_scheduler_random import SchedulerMachine

from jserve.cache.manager import CacheManager
from jserve.cache.window import WindowGroup
from jserve.plan import StepPlan
from jserve.runner.window_share import kept_tokens
from jserve.scheduler.scheduler import Scheduler
from jserve.types import Submit


class WindowedRunner:
    """A scripted runner with a second pool, which it reads only as far back as the window."""

    def __init__(self, runner: ScriptedRunner, group: WindowGroup) -> None:
        self._runner, self._group = runner, group
        self.pool = np.full((group.num_pages, group.page_size), -1, np.int64)
        self.tables = [[0] * 1000 for _ in runner.tables]
        self.log, self.chunks = runner.log, runner.chunks

    def launch(self, plan: StepPlan) -> Flight:
        flight = self._runner.launch(plan)
        page, at = self._group.page_size, 0
        for edit in plan.edits:
            (pages,) = edit.group_pages
            assert len(pages) == len(edit.pages) and pages.dtype == np.int32
            self.tables[edit.slot][: len(pages)] = pages.tolist()
        (new_pages,) = plan.group_new_pages
        assert ((new_pages > 0) == (plan.new_pages > 0)).all() and new_pages.dtype == np.int32
        for slot, q_len, kv_len in zip(plan.slots, plan.q_lens, plan.kv_lens, strict=True):
            for position in range(kv_len - q_len, kv_len):
                if new_pages[at]:
                    self.tables[slot][position // page] = int(new_pages[at])
                where = self.tables[slot][position // page]
                assert where > 0, "a token without a window page"
                self.pool[where, position % page] = self._runner.contexts[slot][position]
                at += 1
        for slot, q_len, kv_len in zip(plan.slots, plan.q_lens, plan.kv_lens, strict=True):
            first = max(kv_len - q_len + 1 - self._group.window, 0)
            seen = np.arange(first, kv_len)
            held = self.pool[np.array(self.tables[slot])[seen // page], seen % page]
            assert held.tolist() == self._runner.contexts[slot][first:kv_len]
        return flight


def windowed(
    window: int = 8,
    window_pages: int = 18,
    num_pages: int = 64,
    depth: int = 1,
    **numbers: object,
) -> tuple[Simulation, WindowGroup]:
    """A simulation whose cache has a window group too."""
    sim = Simulation(num_pages=num_pages, depth=depth, **numbers)
    page = sim.settings.page_size
    group = WindowGroup(
        window,
        kept_tokens(window, page),
        num_pages=window_pages,
        full_pages=num_pages,
        page_size=page,
    )
    sim.cache = CacheManager(num_pages, page, groups=(group,))
    sim.scheduler = Scheduler(sim.settings, sim.cache)
    sim.runner = WindowedRunner(sim.runner, group)  # type: ignore[assignment]
    return sim, group


def answers(sim: Simulation, submits: Sequence[Submit]) -> None:
    for item in submits:
        sim.scheduler.submit(item)
    sim.run()
    for item in submits:
        assert sim.outputs(item.rid) == solo(item, item.sampling.sampling_seed), item.rid
    assert sim.free_and_cached()


def test_long_prompts_run_in_a_window_pool_that_holds_none_of_them() -> None:
    sim, group = windowed(window_pages=12, num_pages=200, context_length=400)
    submits = [
        submit(f"r{i}", prompt(250 + 10 * i, salt=i), 60, sampling_seed=i, ignore_eos=True)
        for i in range(3)
    ]
    answers(sim, submits)
    assert group.slid > 0 and group.tombstones > 0
    stats = sim.scheduler.stats()
    assert stats["num_chunked_requests_total"] == 3
    assert stats["max_total_num_tokens_swa"] == 11 * 4
    assert group.available == 11


def test_a_waiting_prompt_starts_when_a_running_one_has_slid_not_when_it_ends() -> None:
    sim, group = windowed(window_pages=17, num_pages=200, context_length=400)
    first = submit("long", prompt(100), 200, sampling_seed=1, ignore_eos=True)
    second = submit("next", prompt(60, salt=1), 8, sampling_seed=2, ignore_eos=True)
    answers(sim, [first, second])
    ended = [rid for rid, deltas in sim.deltas.items() if deltas[-1].finish]
    assert ended[0] == "next"
    assert group.slid > 0


def test_a_second_turn_is_cached_to_its_last_page() -> None:
    sim, _ = windowed(window_pages=60, num_pages=64)
    first = submit("first", prompt(30), 20, sampling_seed=3, ignore_eos=True)
    answers(sim, [first])
    longer = [*first.prompt_ids, *sim.outputs("first"), 1, 2, 3]
    answers(sim, [submit("second", longer, 4, sampling_seed=4)])
    assert sim.deltas["second"][-1].cached_tokens == (30 + 20 - 1) // 4 * 4


def test_windows_count_in_admission() -> None:
    sim, _ = windowed(window_pages=14, num_pages=40, num_slots=8, schedule_conservativeness=0.02)
    submits = [
        submit(f"r{i}", prompt(5 + i, salt=i), 40, sampling_seed=i, ignore_eos=True)
        for i in range(8)
    ]
    most = 0
    for item in submits:
        sim.scheduler.submit(item)

    def each(_: int) -> None:
        nonlocal most
        most = max(most, len(sim.scheduler._roster.residents))

    sim.run(each=each)
    for item in submits:
        assert sim.outputs(item.rid) == solo(item, item.sampling.sampling_seed), item.rid
    assert 1 < most < 8, "not all at once: their windows would not fit"


def test_a_window_pool_that_runs_short_retracts_although_the_full_one_has_room() -> None:
    sim, _ = windowed(window_pages=16, num_pages=200, num_slots=8, schedule_conservativeness=0.02)
    submits = [submit(f"r{i}", prompt(5, salt=i), 40, sampling_seed=i) for i in range(30)]
    answers(sim, [item for item in submits if len(solo(item, item.sampling.sampling_seed)) > 35])
    stats = sim.scheduler.stats()
    assert stats["num_retracted_requests_total"] > 0
    assert stats["kv_available_tokens"] > 300


class WindowedMachine(SchedulerMachine):
    """The random events of test_scheduler_random.py, with a window group."""

    def __init__(self) -> None:
        super().__init__()
        page = self.sim.settings.page_size
        numbers = {
            "num_pages": 1 + -(-64 // page),
            "window_pages": 1 + -(-44 // page),
            "window": 6,
            "context_length": 64,
            "num_slots": 4,
            "chunked_prefill_size": max(12, page),
            "schedule_conservativeness": 0.02,
        }
        self.sim, self.group = windowed(**numbers, **self.options)

    def teardown(self) -> None:
        super().teardown()
        assert self.group.available == self.group.num_pages - 1
        self.events["slid"] += self.group.slid
        self.events["tombstones"] += self.group.tombstones


def run_machine(
    examples: int, steps: int, met: Sequence[str], first_seed: int = 0, **options: object
) -> Counter[str]:
    """At least so many; more until all of `met` has happened."""
    events: Counter[str] = Counter()
    machine = type("Machine", (WindowedMachine,), {"events": events, "options": options})
    run_rounds(machine, examples, steps, lambda: all(events[name] for name in met), 3, first_seed)
    return events


MET = ("slid", "tombstones", "chunks", "cached_tokens_total")
RARE = ("num_retracted_requests_total", "reset")


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "depth": 1},
        {"page_size": 4, "depth": 0},
        {"page_size": 3, "depth": 1, "mixed": False},
    ],
)
def test_any_order_of_events_gives_solo_answers_with_windows(options: dict) -> None:
    events = run_machine(30, 30, MET, **options)
    for name in MET:
        assert events[name] > 0, f"{name} never happened: {events}"


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 4])
def test_any_order_of_very_many_events_with_windows(page_size: int) -> None:
    events = run_machine(400, 60, RARE, page_size=page_size, depth=1)
    assert all(events[name] > 0 for name in RARE), events
