"""An engine in simulated time: the real scheduler and cache, a runner that costs `a + b · tokens`
seconds a step and draws tokens by formula, three kinds of traffic, and an oracle of the hit rate.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from lru_oracle import LRUOracle

from jserve.cache.manager import CacheManager
from jserve.plan import StepOutcome, StepPlan
from jserve.scheduler.request import Row, SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.types import Delta, SamplingParams, Submit

VOCAB = 32_000
EOS = 0
PAGE = 16


@dataclasses.dataclass(slots=True)
class Job:
    """One request: what it asks, and how many tokens it will answer before it stops by itself."""

    arrival: float
    prompt: np.ndarray  # int32
    answer_len: int
    limit: int  # its max_new_tokens, ≥ answer_len
    priority: int | None = None
    turns_left: int = 0  # of a conversation
    order: int = -1  # of its arrival at the engine


#: What a job that is over leads to, from its answer and the time.
FollowUp = Callable[[Job, np.ndarray, float], Job | None]


def drawn(orders: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The token that request number `orders` draws at each output index, unless it is the last."""
    mixed = orders.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += indices.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    return (1 + mixed % np.uint64(VOCAB - 1)).astype(np.int32)


class Runner:
    """What the device would know: of each slot who is in it and how long it will answer."""

    def __init__(self, num_slots: int) -> None:
        self.orders = np.zeros(num_slots, np.int64)
        self.lasts = np.zeros(num_slots, np.int64)  # output index of the EOS

    def enter(self, slot: int, job: Job) -> None:
        self.orders[slot], self.lasts[slot] = job.order, job.answer_len - 1

    def launch(self, plan: StepPlan) -> StepOutcome:
        slots, indices = plan.slots[plan.samples], plan.output_index[plan.samples]
        tokens = drawn(self.orders[slots], indices)
        tokens[indices == self.lasts[slots]] = EOS
        return StepOutcome(tokens, None, None)


@dataclasses.dataclass(slots=True)
class Report:
    """Times are simulated seconds, by order of arrival; NaN: it has not come to that."""

    arrived: np.ndarray
    admitted: np.ndarray
    finished: np.ndarray
    overtaken: np.ndarray  # later arrivals that were admitted earlier
    longest_step: float
    hit_rate: float
    oracle: LRUOracle
    stats: dict[str, float]
    host_seconds: float  # of scheduler and cache alone
    peak_queue: int

    @property
    def waits(self) -> np.ndarray:
        return self.admitted - self.arrived

    def line(self, name: str) -> str:
        """For whoever reads the test's output."""
        n, steps = len(self.arrived), self.stats["steps_total"]
        return (
            f"{name}: {n} requests, {steps:.0f} steps, hit rate {self.hit_rate:.4f} (LRU oracle "
            f"{self.oracle.hit_rate:.4f}), wait p50 {np.median(self.waits):.2f} s, max "
            f"{self.waits.max():.2f} s, peak queue {self.peak_queue}, most overtaken "
            f"{self.overtaken.max()}, retracted {self.stats['num_retracted_requests_total']:.0f}, "
            f"preempted {self.stats['num_preempted_requests_total']:.0f}, host "
            f"{n / self.host_seconds:.0f} requests/s, "
            f"{self.host_seconds / steps * 1e6:.0f} us/step"
        )


class SimulatedEngine:
    """Serves one trace to its end."""

    def __init__(
        self,
        trace: Iterator[Job],
        num_jobs: int,
        *,
        follow_up: FollowUp = lambda job, answer, now: None,
        num_pages: int,
        step_cost: tuple[float, float] = (0.008, 2e-5),
        **settings: object,
    ) -> None:
        numbers: dict = {
            "num_slots": 128,
            "context_length": 8192,
            "page_size": PAGE,
            "chunked_prefill_size": 2048,
            "max_prefill_tokens": 8192,
            "vocab_size": VOCAB,
            "eos_token_ids": (EOS,),
        }
        self.now = 0.0
        self.settings = SchedulerSettings(**(numbers | settings))
        self.cache = CacheManager(num_pages, PAGE)
        self.scheduler = Scheduler(self.settings, self.cache, clock=lambda: self.now)
        self.runner = Runner(self.settings.num_slots)
        self.oracle = LRUOracle(num_pages - 1, PAGE)
        self._trace, self._step_cost = trace, step_cost
        self._follow_up = follow_up
        self._follow_ups: list[tuple[float, int, Job]] = []
        self._next: Job | None = next(trace, None)
        self.jobs: list[Job] = []
        self._rows: dict[str, Row] = {}
        self._num_off = 0.0  # retractions and preemptions so far
        self._overtaken = Overtaken(num_jobs)
        self._tickets = itertools.count()
        self._times = np.full((3, num_jobs), np.nan)
        self._host = 0.0

    def run(self) -> Report:
        queue: deque[tuple[StepPlan, StepOutcome]] = deque()
        longest, peak = 0.0, 0
        while self._next or self._follow_ups or self.scheduler.has_work or queue:
            self._submit_arrivals()
            started = time.thread_time()
            plan = self.scheduler.plan()
            self._host += time.thread_time() - started
            self._see_released()
            if plan is not None:
                self._see_plan(plan)
                queue.append((plan, self.runner.launch(plan)))
                cost = self._step_cost[0] + self._step_cost[1] * plan.num_tokens
                longest = max(longest, cost)
                self.now += cost
            elif not queue:
                self.now = max(self.now, self._next_arrival())
            if queue and (plan is None or len(queue) > self.settings.lookahead):
                self._record(*queue.popleft())
            peak = max(peak, len(self.scheduler._roster.waiting))
        stats = self.scheduler.stats()
        rate = stats["cached_tokens_total"] / stats["prompt_tokens_total"]
        times = self._times[:, : len(self.jobs)]
        overtaken = self._overtaken.counts[: len(self.jobs)]
        args = (longest, rate, self.oracle, stats, self._host, peak)
        return Report(times[0], times[1], times[2], overtaken, *args)

    def _next_arrival(self) -> float:
        times = [self._next.arrival] if self._next else []
        times += [self._follow_ups[0][0]] if self._follow_ups else []
        return min(times)

    def _submit_arrivals(self) -> None:
        while self._next and self._next.arrival <= self.now:
            self._submit(self._next)
            self._next = next(self._trace, None)
        while self._follow_ups and self._follow_ups[0][0] <= self.now:
            self._submit(heapq.heappop(self._follow_ups)[2])

    def _submit(self, job: Job) -> None:
        job.order = len(self.jobs)
        self.jobs.append(job)
        self._times[0, job.order] = job.arrival
        sampling = SamplingParams(max_new_tokens=job.limit, temperature=0.0)
        prompt = job.prompt.tolist()
        item = Submit(
            rid=str(job.order), prompt_ids=prompt, sampling=sampling, priority=job.priority
        )
        started = time.thread_time()
        self.scheduler.submit(item)
        self._host += time.thread_time() - started

    def _see_released(self) -> None:
        """Rows that were taken off the device while this plan was made."""
        totals = self.scheduler._roster.totals
        off = totals["num_retracted_requests_total"] + totals["num_preempted_requests_total"]
        if off != self._num_off:
            self._num_off = off
            for rid, row in [*self._rows.items()]:
                if not row.alive:
                    self.oracle.release(int(rid))
                    del self._rows[rid]

    def _see_plan(self, plan: StepPlan) -> None:
        rows = [row for row in plan.rows if isinstance(row, Row)]
        n, oracle = plan.num_decode_rows, self.oracle
        for r in np.flatnonzero(plan.new_pages[:n]).tolist():
            oracle.grow(int(rows[r].request.rid), int(plan.kv_lens[r]))
        edited = {edit.slot for edit in plan.edits}
        chunks = [*zip(rows[n:], plan.kv_lens[n:].tolist(), strict=True)]
        for row, kv_len in chunks:
            order = int(row.request.rid)
            if row.slot in edited:
                first = bool(np.isnan(self._times[1, order]))
                oracle.admit(order, row.tokens, first)
                self.runner.enter(row.slot, self.jobs[order])
                self._rows[row.request.rid] = row
                if first:
                    self._times[1, order] = self.now
                    self._overtaken.admit(order)
            oracle.grow(order, kv_len)
        for row, kv_len in chunks:
            oracle.publish(int(row.request.rid), kv_len)

    def _record(self, plan: StepPlan, outcome: StepOutcome) -> None:
        started = time.thread_time()
        deltas = self.scheduler.commit(plan, outcome)
        self._host += time.thread_time() - started
        for delta in deltas:
            self._finish(delta)

    def _finish(self, delta: Delta) -> None:
        job = self.jobs[int(delta.rid)]
        assert delta.finish is not None and delta.finish.type == "stop", delta.finish
        assert len(delta.token_ids) == job.answer_len
        self._times[2, job.order] = self.now
        answer = np.array(delta.token_ids, np.int32)
        if delta.rid in self._rows:
            del self._rows[delta.rid]
        self.oracle.finish(job.order, np.concatenate([job.prompt, answer[:-1]]))
        follow_up = self._follow_up(job, answer, self.now)
        if follow_up is not None:
            heapq.heappush(self._follow_ups, (follow_up.arrival, next(self._tickets), follow_up))


class Overtaken:
    """For each request the number of later arrivals that were admitted earlier: a Fenwick tree."""

    def __init__(self, n: int) -> None:
        self.counts = np.zeros(n, np.int64)
        self._tree = [0] * (n + 1)
        self._admitted = 0

    def admit(self, order: int) -> None:
        earlier, i = 0, order + 1  # admitted so far, with an order of at most this one
        while i > 0:
            earlier += self._tree[i]
            i &= i - 1
        self.counts[order] = self._admitted - earlier
        self._admitted += 1
        i = order + 1
        while i < len(self._tree):
            self._tree[i] += 1
            i += i & -i
