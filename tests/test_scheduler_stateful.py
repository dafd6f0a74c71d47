"""Scheduler and cache together under random operations: after each of them the cache equals its
brute-force model, and no plan ever writes a page that is not its row's, or attends to anything but
its row's own tokens (shadow_memory.py).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import ClassVar

import pytest
from cache_model import ORDERS, WatchedCache
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from shadow_memory import EOS, VOCAB, Script, ShadowMemory

from jserve.cache.manager import Lease
from jserve.errors import RequestError
from jserve.plan import StepOutcome, StepPlan
from jserve.scheduler.admission import prompt_budget
from jserve.scheduler.request import Row, SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.types import Abort, Delta, LogprobParams, SamplingParams, Submit

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
RANKED = ("fcfs", "lof")  # go with priorities
#: By page size: about two requests fit, or one long one.
POOL_PAGES = {1: 78, 3: 26, 16: 6}
SALTS = [(None, None)] * 4 + [("lora", None), (None, "salt")]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of two families of prompts, and conversations that go on from earlier answers,
    through a pool that holds about two of them.
    """

    page_size: ClassVar[int]
    policy: ClassVar[str]
    events: ClassVar[Counter[str]]

    @initialize(
        eviction=st.sampled_from([*ORDERS]),
        mixed=st.booleans(),
        depth=st.integers(0, 2),
        radix=st.sampled_from([True] * 7 + [False]),
        spare=st.integers(0, 3),
        mixed_chunk=st.sampled_from([512, 8]),
        ranked=st.booleans(),
    )
    def build(self, eviction, mixed, depth, radix, spare, mixed_chunk, ranked) -> None:
        page = self.page_size
        self.unit = max(4, page)
        pages = 1 + POOL_PAGES[page] + spare
        self.ranked = ranked and self.policy in RANKED
        self.settings = SchedulerSettings(
            num_slots=5,
            context_length=24 * self.unit,
            page_size=page,
            chunked_prefill_size=max(12, 2 * page),
            mixed_chunk_size=mixed_chunk,
            mixed_chunk_most=spare % 2 * max(12, 2 * page),
            max_prefill_tokens=64,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            mixed=mixed,
            policy=self.policy,
            schedule_conservativeness=0.02,
            lookahead=depth,
            enable_priority_scheduling=self.ranked,
            priority_scheduling_preemption_threshold=1,
            retraction_policy="priority" if self.ranked else "length",
        )
        self.cache = WatchedCache(pages, page, self.events, eviction=eviction, radix=radix)
        self.cache.on_finish = self.check_finish
        self.scheduler = Scheduler(self.settings, self.cache)
        self.stays: dict[Lease, Row] = {}
        self.scripts: dict[str, Script] = {}
        self.memory = ShadowMemory(page, self.scripts)
        self.queue: deque[tuple[StepPlan, StepOutcome]] = deque()
        self.deltas: dict[str, list[Delta]] = {}
        self.cut_short: set[str] = set()  # aborted by us
        self.resets = 0
        self.broken = False  # amid a step: what follows would only hide the failure

    # ---- operations ----

    @rule(
        family=st.integers(0, 1),
        shared=st.sampled_from([1, 2, 6, 3, 0]),
        own=st.sampled_from([3, 1, 2, 5, 9]),
        new=st.sampled_from([20, 30, 24, 9, 30, 20, 30, 0, 1]),
        salt=st.sampled_from(SALTS),
        scored=st.sampled_from([None, None, None, -1, 0, 3, 99]),
        priority=st.sampled_from([None, 0, 2, 4]),
        earlier=st.sampled_from([0, 1, 2, 3, 5, 8, 99, 99, 99]),
        burst=st.sampled_from([4, 3, 2, 6]),
        ticks=st.sampled_from([1, 2, 3, 0]),
    )
    def submit(
        self, family, shared, own, new, salt, scored, priority, earlier, burst, ticks
    ) -> None:
        """New prompts, or some that go on from what an earlier request was answered."""
        for i in range(burst):
            self.tick(ticks)
            order = len(self.scripts)
            prompt = [(3 * k + family) % VOCAB for k in range(max(shared - i, 0) * self.unit)]
            if earlier < order and i == 0:
                script = self.scripts[f"{'ab'[earlier % 2]}{earlier}"]
                prompt = [*script.submit.prompt_ids, *script.outputs()]
                salt = script.namespace
            prompt += [(order + 11 * k) % VOCAB for k in range(own)]
            start = None if scored is None else min(scored, len(prompt))
            self.offer(
                Submit(
                    rid=f"{'ab'[order % 2]}{order}",
                    prompt_ids=prompt,
                    sampling=SamplingParams(
                        max_new_tokens=new, ignore_eos=order % 4 == 3, temperature=0.0
                    ),
                    logprobs=None if start is None else LogprobParams(start_len=start),
                    extra_key=salt[0],
                    cache_salt=salt[1],
                    priority=priority if self.ranked else None,
                    stream=order % 3 == 0,
                ),
                order,
            )

    def offer(self, item: Submit, order: int) -> None:
        self.events["operations"] += 1
        length, new = len(item.prompt_ids), item.sampling.max_new_tokens
        capacity = self.cache.total_pages * self.page_size
        try:
            self.scheduler.submit(item)
        except RequestError:
            assert length + (new or 0) > self.settings.context_length or length > capacity
            self.events["refused"] += 1
        else:
            self.scripts[item.rid] = Script(item, order)

    @rule(n=st.integers(1, 9), early=st.booleans())
    def run(self, n, early) -> None:
        """`early`: then, as before a pause, nothing is left in flight."""
        self.tick(n)
        while early and self.queue:
            self.record()

    def tick(self, n: int) -> None:
        """Up to `n` steps: none while there is nothing to do."""
        for _ in range(n):
            if not self.queue and not self.scheduler.has_work:
                break
            self.events["operations"] += 1
            self.step()

    @rule(
        how=st.sampled_from(
            [
                *("abort", "abort", "stopped", "family", "all", "flush", "lose the device"),
                *("in_place", "retract", "pause and abort", "continue", "continue", "continue"),
            ]
        ),
        which=st.integers(0, 40),
        ticks=st.integers(0, 6),
    )
    def interrupt(self, how, which, ticks) -> None:
        self.tick(ticks)
        self.events["operations"] += 1
        if how == "continue":
            self.scheduler.resume()
        elif how == "flush":
            self.events["flushed"] += self.scheduler.flush_cache()
        elif how == "lose the device":
            self.lose_the_device()
        elif how in ("in_place", "retract", "pause and abort"):
            self.pause(how.removeprefix("pause and "))
        else:
            self.abort(how, which)
        self.take(self.scheduler.drain())

    def abort(self, how: str, which: int) -> None:
        victims = [rid for rid in self.scripts if not self.is_over(rid)]
        if not victims:
            return
        rid = victims[which % len(victims)]
        if how == "family":
            victims = [other for other in victims if other[0] == rid[0]]
            item = Abort(rid=rid[0], exact=False)
        elif how == "all":
            item = Abort(abort_all=True)
        else:
            victims = [rid]
            item = Abort(rid=rid, stopped=how == "stopped")
        flying = {row.request.rid for plan, _ in self.queue for row in rows_of(plan)}
        self.cut_short.update(victims)
        self.events["aborted in flight"] += bool(flying.intersection(victims))
        self.scheduler.abort(item)

    def lose_the_device(self) -> None:
        if self.queue and not self.resets:
            self.resets += 1
            self.events["reset"] += 1
            self.queue.clear()
            self.memory.cells.clear()
            self.take(self.scheduler.reset_device())

    def pause(self, mode: str) -> None:
        while self.queue:
            self.record()
        if mode == "abort":
            self.cut_short.update(rid for rid in self.scripts if not self.is_over(rid))
        self.events["paused"] += self.scheduler.has_work
        self.scheduler.pause(mode)
        assert self.scheduler.idle
        if mode != "in_place":
            assert self.cache.available_pages == self.cache.total_pages

    # ---- the engine ----

    def step(self) -> None:
        self.broken, before = True, set(self.cache.model.cached)
        evicted = self.events["evicted"]
        plan = self.scheduler.plan()
        if plan is not None:
            self.check_budgets(plan)
            leases = self.cache.refreshed()
            self.stays.update((row.lease, row) for row in rows_of(plan))
            self.queue.append((plan, self.memory.launch(plan, leases)))
            if self.events["evicted"] == evicted:
                self.check_hits(plan, before)
        if self.queue and (plan is None or len(self.queue) > self.settings.lookahead):
            self.record()
        self.take(self.scheduler.drain())
        self.cache.agree_in_full()
        self.broken = False

    def record(self) -> None:
        plan, outcome = self.queue.popleft()
        self.take(self.scheduler.commit(plan, outcome))

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.rid, []).append(delta)

    def is_over(self, rid: str) -> bool:
        return rid in self.cut_short or self.finish(rid) is not None

    def finish(self, rid: str) -> str | None:
        finish = self.deltas[rid][-1].finish if rid in self.deltas else None
        return None if finish is None else finish.type

    def check_budgets(self, plan: StepPlan) -> None:
        prompts = plan.num_tokens - plan.num_decode_rows
        behind = len(self.scheduler._roster.requests)  # at most
        assert prompts <= prompt_budget(self.settings, plan.num_decode_rows, behind)
        pairs = zip(rows_of(plan), plan.kv_lens.tolist(), strict=True)
        cut = sum(kv_len < len(row.tokens) for row, kv_len in pairs)
        assert cut <= 1, "two requests are cut"
        assert self.settings.mixed or not plan.num_decode_rows or not prompts

    def check_hits(self, plan: StepPlan, before: set) -> None:
        """Nothing was evicted in this step: who came in took all that the cache had for it."""
        for edit in plan.edits:
            slot = self.memory.slots[edit.slot]
            script, n = slot.script, (len(edit.pages) + 1) * self.page_size
            length = len(script.submit.prompt_ids) + len(edit.output_ids)
            wanted = script.submit.logprobs
            if n < length and (wanted is None or wanted.start_len < 0):
                longer = tuple(script.token(i) for i in range(n))
                assert (script.namespace, longer) not in before, f"a hit was missed: {n=}"

    def check_finish(self, lease: Lease, num_tokens: int) -> None:
        """What stays cached was written by launches that have come in: not the last token."""
        request = self.stays[lease].request
        assert num_tokens <= len(request.prompt) + max(len(request.output_ids) - 1, 0)

    # ---- what holds after each ----

    @invariant()
    def is_whole(self) -> None:
        self.scheduler.check_integrity()
        self.cache.agree_in_full()
        for prefix, entry in self.cache.model.cached.items():
            self.memory.check_cached(prefix, entry.page)
        if not self.scheduler.has_work:
            assert self.cache.available_pages == self.cache.total_pages

    def teardown(self) -> None:
        if self.broken:
            return
        self.scheduler.resume()
        for _ in range(3000):
            if not self.scheduler.has_work and not self.queue:
                break
            self.step()
        else:
            raise AssertionError(f"never done: {self.scheduler.stats()}")
        self.is_whole()
        for rid, script in self.scripts.items():
            self.check_answer(rid, script)
        stats = self.scheduler.stats()
        for name in (
            "num_retracted_requests_total",
            "num_preempted_requests_total",
            "num_chunked_requests_total",
        ):
            self.events[name] += int(stats[name])
        self.events["reads"] += self.memory.reads

    def check_answer(self, rid: str, script: Script) -> None:
        deltas, expected = self.deltas.get(rid, []), script.outputs()
        got = [token for delta in deltas for token in delta.token_ids]
        assert got == expected[: len(got)], f"{rid}: {got} not {expected}"
        if rid in self.cut_short:
            return
        finish = deltas[-1].finish
        assert finish is not None, f"{rid} never ended"
        if finish.type == "abort":
            most = len(script.submit.prompt_ids) + len(expected) - 1
            assert most > self.cache.total_pages * self.page_size, f"{rid}: {finish.message}"
            self.events["too long for the pool"] += 1
            return
        assert got == expected, f"{rid}: {got} not {expected}"
        assert (finish.type == "stop") == (
            len(got) > 0 and got[-1] == EOS and not (script.submit.sampling.ignore_eos)
        )
        self.events[f"ended by {finish.type}"] += 1
        wanted = script.submit.logprobs
        if wanted is not None and wanted.start_len >= 0:
            scored = deltas[0].input_logprobs
            head = [None] if wanted.start_len == 0 else []
            prompt = [float(t) for t in script.submit.prompt_ids[max(wanted.start_len, 1) :]]
            assert scored is not None and scored.values == head + prompt


def rows_of(plan: StepPlan) -> list[Row]:
    return [row for row in plan.rows if isinstance(row, Row)]


def run_machine(
    page_size: int, policy: str, examples: int, steps: int, number: int = 0
) -> Counter[str]:
    """`number`: of the run, so that each is another one."""
    fields = {"page_size": page_size, "policy": policy, "events": Counter()}
    machine = seed(number)(type("Machine", (SchedulerMachine,), fields))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.events


#: What a run must have met to prove anything; the rare ones show in long runs only.
FIRED = (
    *("hit", "evicted", "sealed", "extended", "inserted", "flushed", "paused"),
    *("aborted in flight", "num_chunked_requests_total", "num_retracted_requests_total"),
    *("num_preempted_requests_total", "ended by stop", "ended by length"),
)
RARE = ("reset", "refused", "too long for the pool")


@pytest.mark.parametrize("page_size", POOL_PAGES)
def test_every_plan_runs_on_kv_that_is_there_and_its_own(page_size):
    events = Counter[str]()
    for number, policy in enumerate(POLICIES * 2):
        events += run_machine(page_size, policy, examples=8, steps=25, number=number)
    assert all(events[name] for name in FIRED), events


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page_size", POOL_PAGES)
def test_every_plan_of_very_many_runs_on_kv_that_is_there_and_its_own(page_size):
    """With the other page sizes 10⁵ operations."""
    events = Counter[str]()
    for number, policy in enumerate(POLICIES * 6):
        events += run_machine(page_size, policy, examples=12, steps=40, number=100 + number)
    assert all(events[name] for name in FIRED + RARE), events
    assert events["operations"] > 100_000 / 3, events
