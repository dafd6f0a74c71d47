"""A flush of several ranks is of all or of none: of engines side by side, and of one loop's. And
what a loop's ranks tell while one has nothing to do.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from fake_engine import ScriptedRunner, make_scheduler
from test_ranks import fronted

from jserve.engine.local import local_ends
from jserve.engine.placement import Placement
from jserve.engine.ranks import Front
from jserve.engine.stacked_loop import StackedLoop
from jserve.engine.stacked_rank import RankParts
from jserve.types import Control, ControlReply, Gauges, SamplingParams, Submit


def replies(front: Front) -> list[ControlReply]:
    return [one for one in front.drain() if isinstance(one, ControlReply)]


def test_no_rank_is_flushed_when_one_would_refuse() -> None:
    front, ends = fronted(2)
    front.send(Control(id="1", op="flush_cache"))
    assert [[one.op for one in end.drain()] for end in ends] == [["may_flush"]] * 2
    front.receive(0, [ControlReply(id="1", ok=True)])
    assert not replies(front)
    front.receive(1, [ControlReply(id="1", ok=False)])
    assert [one.ok for one in replies(front)] == [False]
    assert not any(end.drain() for end in ends)


@pytest.mark.parametrize("refused", [False, True])
def test_all_are_flushed_when_none_would_refuse_and_what_each_does_counts(refused: bool) -> None:
    front, ends = fronted(2)
    for again in "12":
        front.send(Control(id=again, op="flush_cache"))
        for rank, end in enumerate(ends):
            assert [one.op for one in end.drain()] == ["may_flush"]
            front.receive(rank, [ControlReply(id=again, ok=True)])
        for rank, end in enumerate(ends):
            assert [one.op for one in end.drain()] == ["flush_cache"] and not replies(front)
            front.receive(rank, [ControlReply(id=again, ok=not (refused and rank))])
        assert [(one.id, one.ok) for one in replies(front)] == [(again, not refused)]


def test_a_rank_that_is_lost_amid_a_flush_keeps_no_other_from_it() -> None:
    front, ends = fronted(3)
    front.send(Control(id="1", op="flush_cache"))
    front.receive(0, [ControlReply(id="1", ok=True)])
    front.receive(1, [ControlReply(id="1", ok=True)])
    front.lose(2, "killed")
    assert [one.op for one in ends[0].drain()] == ["may_flush", "flush_cache"]
    front.receive(0, [ControlReply(id="1", ok=True)])
    front.lose(1, "killed")
    assert [one.ok for one in replies(front)] == [True]


class TwoScripts:
    """Runs two ranks' steps by formula, as a StackedRunner."""

    def __init__(self) -> None:
        self.ranks = [ScriptedRunner(), ScriptedRunner()]
        self.flights: list[Any] = []

    def launch(self, plans: list[Any]) -> TwoScripts:
        pairs = zip(self.ranks, plans, strict=True)
        self.flights.append([plan and rank.launch(plan) for rank, plan in pairs])
        return self

    def finish(self, _: TwoScripts, masks: list[Any]) -> None:
        for rank, flight in zip(self.ranks, self.flights[-1], strict=True):
            if flight is not None:
                rank.finish(flight)

    def read(self) -> list[Any]:
        return [flight and flight.read() for flight in self.flights.pop(0)]


def stacked(runner: TwoScripts, end: Any) -> tuple[StackedLoop, list[Any]]:
    """A loop of two ranks, and their schedulers."""
    schedulers = [make_scheduler(1) for _ in range(2)]
    parts = [
        RankParts(i, scheduler, lambda plan: None, runner.ranks[i], {})
        for i, scheduler in enumerate(schedulers)
    ]
    loop = StackedLoop(parts, cast(Any, runner), end, Placement(2, 4), depth=1, page_size=4)
    return loop, schedulers


def asked(rid: str, rank: int, count: int) -> Submit:
    sampling, prompt = SamplingParams(max_new_tokens=count, temperature=0.0), list(range(1, 33))
    return Submit(rid=rid, prompt_ids=prompt, sampling=sampling, routed_dp_rank=rank)


def test_ranks_of_one_loop_are_flushed_together_at_once_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, (api, end), rests = TwoScripts(), local_ends(), []
    monkeypatch.setattr(end, "wait", rests.append)
    loop, schedulers = stacked(runner, end)

    def flush(ticks: int) -> bool:
        api.send(Control(id="1", op="flush_cache"))
        for _ in range(ticks):
            loop.tick()
        (reply,) = [one for one in api.drain() if isinstance(one, ControlReply)]
        return reply.ok

    api.send(asked("over", 0, 2))
    api.send(asked("long", 1, 60))
    loop.tick()
    while schedulers[0].has_work:
        loop.tick()
    held = schedulers[0].cache.tree.evictable_pages
    assert held == 8 and schedulers[1].has_work and not flush(2)
    assert schedulers[0].cache.tree.evictable_pages == held
    while schedulers[1].has_work:
        loop.tick()
    assert schedulers[1].cache.tree.evictable_pages > held
    rests.clear()
    assert flush(2) and len(rests) == 1, "it rested between the two questions"
    assert [scheduler.cache.tree.evictable_pages for scheduler in schedulers] == [0, 0]


def test_what_all_ranks_have_in_common_is_told_while_the_first_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jserve.engine.gauges.INTERVAL", 0.0)
    runner, (api, end) = TwoScripts(), local_ends()
    loop, _ = stacked(runner, end)
    api.send(asked("long", 1, 60))
    told = []
    for step in range(1, 11):
        runner.ranks[0].tokens["expert_tokens_total/0"] = step
        loop.tick()
        gauges = [one for one in api.drain() if isinstance(one, Gauges)]
        told += [one.values.get("expert_tokens_total/0", 0) for one in gauges]
    assert told[-1] == 10 and len(set(told)) > 5, told
