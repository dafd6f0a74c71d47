"""What the scheduler costs on the host: one tick is plan and commit, and it must hide behind a step
of the device.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from scripted_runner import EOS, submit

from jserve.cache.manager import CacheManager
from jserve.plan import StepOutcome, StepPlan
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler

VOCAB = 50_000


def make(num_slots: int, num_pages: int, chunk: int) -> Scheduler:
    numbers = SchedulerSettings(
        num_slots=num_slots,
        context_length=40_960,
        page_size=16,
        chunked_prefill_size=chunk,
        max_prefill_tokens=1 << 20,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
    )
    return Scheduler(numbers, CacheManager(num_pages, 16))


def tick_times(
    scheduler: Scheduler, plans: list[StepPlan], ticks: int
) -> tuple[list[float], list[float]]:
    """Seconds of plan and of commit in each of `ticks` ticks; `plans`: in flight, at most one."""
    plan_times, commit_times = [], []
    for _ in range(ticks):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        plans.append(plan)
        plan_times.append(planned - start)
        if len(plans) > 1:
            oldest = plans.pop(0)
            outcome = StepOutcome(np.full(int(oldest.samples.sum()), 11, np.int32), None, None)
            start = time.perf_counter()
            scheduler.commit(oldest, outcome)
            commit_times.append(time.perf_counter() - start)
    return plan_times, commit_times


def test_plan_and_commit_of_256_streaming_rows_take_a_millisecond():
    scheduler = make(256, 30_000, 8192)
    for i in range(256):
        scheduler.submit(submit(f"r{i}", [i + 100] * 32, 1000, stream=True))
    in_flight: list[StepPlan] = []
    tick_times(scheduler, in_flight, 4)
    plan, commit = tick_times(scheduler, in_flight, 200)
    assert in_flight[-1].num_decode_rows == 256
    micro = [statistics.median(times) * 1e6 for times in (plan, commit)]
    print(f"256 rows: plan {micro[0]:.0f} us, commit {micro[1]:.0f} us")
    assert sum(micro) < 2000, micro  # half of it when nothing else runs


def test_admission_of_a_cached_32k_prompt_takes_a_few_milliseconds():
    scheduler = make(8, 9000, 40_960)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 32_768).tolist()
    times = []
    for i in range(6):
        scheduler.submit(submit(f"r{i}", prompt, 1))
        start = time.perf_counter()
        plan = scheduler.plan()
        times.append(time.perf_counter() - start)
        assert plan is not None and plan.num_tokens == (32_768 if i == 0 else 16)
        scheduler.commit(plan, StepOutcome(np.array([11], np.int32), None, None))
    print(f"plan with a 32k prompt: cold {times[0] * 1e6:.0f} us, cached {min(times) * 1e6:.0f} us")
    assert min(times) < 2e-3
