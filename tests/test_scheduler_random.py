"""Random operations against the scheduler: whatever happens, answers equal solo runs and every page
comes back.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from random_runs import run_rounds
from scripted_runner import VOCAB, Simulation, solo, submit

from jserve.types import Abort, LogprobParams, Submit

#: Over all examples of one run: what has happened, so that a test can assert that it did.
Events = Counter[str]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of two families of shared prefixes, through a pool that holds about two of them."""

    events: ClassVar[Events]
    options: ClassVar[dict]

    def __init__(self) -> None:
        super().__init__()
        page_size = self.options["page_size"]
        self.sim = Simulation(
            num_pages=1 + -(-80 // page_size),
            context_length=96,
            num_slots=4,
            chunked_prefill_size=max(12, page_size),
            schedule_conservativeness=0.02,
            **self.options,
        )
        self.submits: dict[str, Submit] = {}
        self.ended: set[str] = set()
        self.failed_launches = False

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        new=st.sampled_from([30, 20, 40, 7, 1, 0]),
        stream=st.booleans(),
        scored=st.integers(0, 9),
        salt=st.sampled_from([None, None, None, "s"]),
    )
    def submit(self, family, shared, own, new, stream, scored, salt) -> None:
        i = len(self.submits)
        prompt = [(7 * k + family) % VOCAB for k in range(shared)] + own
        start = scored if scored <= len(prompt) and scored < 5 else -1
        item = submit(
            f"{'ab'[i % 2]}{i}",
            prompt,
            min(new, 52 - len(prompt)),  # the pool holds it
            sampling_seed=i,
            stream=stream,
            logprobs=LogprobParams(start_len=start) if scored < 6 else None,
            cache_salt=salt,
        )
        self.submits[item.rid] = item
        self.sim.scheduler.submit(item)

    @rule(n=st.sampled_from([4, 2, 8, 1, 12]))
    def tick(self, n: int) -> None:
        for _ in range(n):
            self.sim.tick()

    @rule(which=st.integers(0, 30), stopped=st.booleans())
    def abort(self, which: int, stopped: bool) -> None:
        rids = [rid for rid in self.submits if rid not in self.ended]
        if rids:
            rid = rids[which % len(rids)]
            self.ended.add(rid)
            self.sim.scheduler.abort(Abort(rid=rid, stopped=stopped))
            self.events["abort"] += 1

    @rule(luck=st.integers(0, 20))
    def fail_a_launch_or_abort_many(self, luck: int) -> None:
        if luck == 0 and not self.failed_launches:
            self.failed_launches = True
            self.sim.queue.clear()
            self.sim.scheduler.reset_device()
            self.events["reset"] += 1
        elif luck == 1:
            self.ended |= {rid for rid in self.submits if rid.startswith("a")}
            self.sim.scheduler.abort(Abort(rid="a", exact=False))
        elif luck == 2:
            self.sim.scheduler.flush_cache()

    @invariant()
    def is_whole(self) -> None:
        self.sim.scheduler.check_integrity()
        stats = self.sim.scheduler.stats()
        used = sum(row.lease.num_pages for row in self.sim.scheduler._roster.residents)
        assert stats["kv_used_tokens"] <= used * self.sim.settings.page_size

    def teardown(self) -> None:
        self.sim.run()
        for rid, item in self.submits.items():
            expected = solo(item, int(rid[1:]))
            got = self.sim.outputs(rid) if rid in self.sim.deltas else []
            assert got == expected[: len(got)]
            assert rid in self.ended or got == expected, f"{rid}: {got} not {expected}"
            if rid not in self.ended and item.logprobs and item.logprobs.start_len >= 0:
                scored = self.sim.deltas[rid][0].input_logprobs
                n = len(item.prompt_ids) - item.logprobs.start_len
                assert scored is not None and len(scored.values) == n
        assert self.sim.free_and_cached() and self.sim.scheduler.idle
        stats = self.sim.scheduler.stats()
        for name in ("num_retracted_requests_total", "evicted_tokens_total", "cached_tokens_total"):
            self.events[name] += int(stats[name])
        self.events["chunks"] += sum(n >= 2 for n in self.sim.runner.chunks.values())


def run_machine(examples: int, steps: int, *met: str, **options: object) -> Events:
    """At least so many; more until all of `met` has happened."""
    events = Events()
    machine = type("Machine", (SchedulerMachine,), {"events": events, "options": options})
    run_rounds(machine, examples, steps, lambda: all(events[name] for name in met), rounds=5)
    return events


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize(
    ("page_size", "depth", "mixed"), [(1, 1, True), (3, 1, False), (16, 0, True)]
)
def test_any_order_of_events_gives_solo_answers_and_gives_every_page_back(
    page_size, depth, mixed, policy
):
    met = ("abort", "chunks", "cached_tokens_total")
    events = run_machine(25, 30, *met, page_size=page_size, depth=depth, mixed=mixed, policy=policy)
    assert all(events[name] for name in met), events


def test_retraction_eviction_and_a_failed_launch_happen_among_random_events():
    met = (
        *("num_retracted_requests_total", "evicted_tokens_total"),
        *("reset", "abort", "chunks"),
    )
    events = run_machine(60, 40, *met, page_size=3, depth=1, mixed=True, policy="fcfs")
    assert all(events[name] for name in met), events


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof", "random"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_order_of_very_many_events(page_size, policy):
    for depth, mixed, radix in ((1, True, True), (0, False, True), (2, True, False)):
        run_machine(
            60, 60, page_size=page_size, policy=policy, depth=depth, mixed=mixed, radix=radix
        )
