"""The real scheduler and cache under three kinds of traffic in simulated time: what LRU can hit is
hit, nobody starves, and what is taken off the device for want of pages or rank comes back.
"""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Job, Report, SimulatedEngine
from traffic import conversations, few_shot, sharegpt

from jserve.scheduler import policy
from jserve.scheduler.policy import MAX_OVERTAKEN

SIZES = [2_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]


def check_hits(report: Report) -> None:
    """Within 1 % of the oracle; and the cache was full, so that LRU had something to choose."""
    assert report.hit_rate == pytest.approx(report.oracle.hit_rate, rel=0.01)
    assert report.oracle.most_overdrawn <= 64, "the oracle had another capacity"
    assert report.stats["evicted_tokens_total"] > 0


def check_served(report: Report) -> None:
    assert not np.isnan([report.arrived, report.admitted, report.finished]).any()


def check_first_come_first_served(report: Report) -> None:
    """Admission is in order of arrival, and whoever still waits when all that came earlier are over
    is admitted in the next round: the steps in flight, and one to find out.
    """
    assert not report.overtaken.any()
    earlier = np.maximum.accumulate(np.concatenate([[0.0], report.finished[:-1]]))
    rounds = 3 * report.longest_step
    assert (report.admitted <= np.maximum(earlier, report.arrived) + rounds).all()


@pytest.mark.parametrize("n", SIZES)
def test_chats_come_in_first_come_first_served_and_out_of_retraction_again(n):
    """Running requests are expected to need less than they do, so that some are retracted."""
    settings = {"num_pages": 1_600, "schedule_conservativeness": 0.3}
    report = SimulatedEngine(sharegpt(n, 65), n, **settings).run()
    print(report.line(f"\nsharegpt, fcfs, {n}"))
    check_served(report)
    check_hits(report)
    check_first_come_first_served(report)
    assert report.stats["num_retracted_requests_total"] > 0


@pytest.mark.parametrize(
    "n", [2_000, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_important_chats_take_the_place_of_others_and_those_come_back(n):
    settings = {"num_pages": 1_600, "enable_priority_scheduling": True}
    engine = SimulatedEngine(sharegpt(n, 65, important=0.05), n, **settings)
    report = engine.run()
    print(report.line(f"\nsharegpt, priorities, {n}"))
    check_served(report)
    check_hits(report)
    assert report.stats["num_preempted_requests_total"] > n / 1000
    important = np.array([job.priority is not None for job in engine.jobs])
    waits, others = report.waits[important], report.waits[~important]
    assert waits.max() < np.median(others), f"{waits.max()=} {np.median(others)=}"
    assert not report.overtaken[important].any()


@pytest.mark.parametrize("n", SIZES)
def test_few_shot_prefixes_are_hit_as_often_as_lru_allows(n):
    """lpm hits more than fcfs, and nobody is overtaken by MAX_OVERTAKEN later arrivals."""
    hit_rates = []
    for name in ("fcfs", "lpm"):
        report = SimulatedEngine(few_shot(n, 54), n, num_pages=4_000, policy=name).run()
        print(report.line(f"\nfew-shot, {name}, {n}"))
        check_served(report)
        check_hits(report)
        hit_rates.append(report.hit_rate)
        if name == "fcfs":
            check_first_come_first_served(report)
    assert hit_rates[0] < hit_rates[1] < report.oracle.unlimited_hit_rate
    assert 0 < report.overtaken.max() < MAX_OVERTAKEN


@pytest.mark.parametrize("n", SIZES)
def test_conversations_find_their_own_past(n):
    trace, follow_up = conversations(n, 9)
    report = SimulatedEngine(trace, n, follow_up=follow_up, num_pages=9_000).run()
    print(report.line(f"\nconversations, fcfs, {n}"))
    check_served(report)
    check_hits(report)
    check_first_come_first_served(report)


def stranger_among_siblings(n: int, policy_name: str) -> Report:
    """24 clients ask on and on behind one long prefix, eight at a time run; number 40 is not of
    them, and nothing of it is cached.
    """
    arrived = 24
    siblings = few_shot(n, 1e6, num_groups=1)
    stranger = next(sharegpt(1, 1.0, seed=9))

    def next_job(now: float) -> Job | None:
        nonlocal arrived
        arrived += 1
        if arrived > n:
            return None
        job = stranger if arrived == 40 else next(siblings)
        job.arrival = now
        return job

    start = [next(siblings) for _ in range(24)]
    settings = {"num_pages": 4_000, "num_slots": 8, "policy": policy_name}
    engine = SimulatedEngine(
        iter(start), n, follow_up=lambda job, answer, now: next_job(now), **settings
    )
    return engine.run()


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_a_stream_of_better_matches_starves_nobody(name, monkeypatch):
    n = 800
    report = stranger_among_siblings(n, name)
    assert MAX_OVERTAKEN - 24 <= report.overtaken.max() < MAX_OVERTAKEN
    bounded, worst = report.waits.max(), int(report.overtaken.argmax())
    monkeypatch.setattr(policy, "MAX_OVERTAKEN", 1 << 60)  # as the order by itself would have it
    report = stranger_among_siblings(n, name)
    print(f"\n{name}: longest wait {bounded:.1f} s, without the bound {report.waits.max():.1f} s")
    assert report.overtaken[worst] > n - 100 and report.waits.max() > 2 * bounded
