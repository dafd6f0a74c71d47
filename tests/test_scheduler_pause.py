"""Pauses as the scheduler sees them: nothing is planned, and every answer goes on where it was."""

from __future__ import annotations

import pytest
from scripted_runner import Simulation, busy_submits, crowded, prompt, solo, submit

from jserve.errors import RequestError
from jserve.types import Abort

MODES = ("abort", "retract", "in_place")


def pause(sim: Simulation, mode: str) -> None:
    """As the loop does: what is in flight is taken in first."""
    while sim.queue:
        flight = sim.queue.popleft()
        take(sim, sim.scheduler.commit(flight.plan, flight.read()))
    sim.scheduler.pause(mode)
    take(sim, sim.scheduler.drain())
    sim.scheduler.check_integrity()


def take(sim: Simulation, deltas: list) -> None:
    for delta in deltas:
        sim.deltas.setdefault(delta.rid, []).append(delta)


def started(ticks: int = 5, **settings) -> Simulation:
    """One request decodes, one has its prompt cut (8 of 60 tokens a step), one waits."""
    sim = Simulation(num_slots=2, chunked_prefill_size=8, **settings)
    for item in ITEMS:
        sim.scheduler.submit(item)
    for _ in range(ticks):
        sim.tick()
    assert sim.scheduler._roster.chunked is not None
    return sim


ITEMS = [
    submit("runs", prompt(6), 40, ignore_eos=True, stream=True),
    submit("cut", prompt(60, 1), 6, ignore_eos=True),
    submit("waits", prompt(6, 2), 6, ignore_eos=True),
]


@pytest.mark.parametrize("mode", MODES)
def test_while_paused_nothing_is_planned_and_newcomers_wait(mode):
    sim = started()
    pause(sim, mode)
    planned = len(sim.plans)
    late = submit("late", prompt(7, 3), 5, ignore_eos=True)
    sim.scheduler.submit(late)
    for _ in range(4):
        sim.tick()
    stats = sim.scheduler.stats()
    assert len(sim.plans) == planned and sim.scheduler.idle and sim.scheduler.paused
    kept, waiting = {"abort": (0, 1), "retract": (0, 4), "in_place": (2, 2)}[mode]
    assert (stats["num_running_reqs"], stats["num_queue_reqs"]) == (kept, waiting)
    assert stats["num_paused_reqs"] == kept + waiting
    sim.scheduler.resume()
    assert sim.scheduler.stats()["num_paused_reqs"] == 0 and not sim.scheduler.paused
    sim.run()
    assert sim.outputs("late") == solo(late, 5)
    for item in ITEMS:
        whole, got = solo(item, 5), sim.outputs(item.rid)
        assert got == (whole[: len(got)] if mode == "abort" else whole)
        assert (sim.finish(item.rid) == "abort") == (mode == "abort")
    assert sim.free_and_cached() and sim.scheduler.idle


def test_who_is_retracted_is_counted_so_in_place_nobody_is():
    for mode, counts in (("retract", [1, 1, 0]), ("in_place", [0, 0, 0])):
        sim = started()
        pause(sim, mode)
        sim.scheduler.resume()
        sim.run()
        assert [sim.deltas[item.rid][-1].num_retractions for item in ITEMS] == counts
        edits = sum(len(plan.edits) for plan in sim.plans)
        assert edits == 3 + sum(counts)  # in place, nobody was set up again
        assert sim.scheduler.stats()["num_retracted_requests_total"] == 0


@pytest.mark.parametrize(("mode", "flushed"), [("abort", 1), ("retract", 1), ("in_place", 0)])
def test_the_cache_can_be_flushed_unless_somebody_keeps_kv(mode, flushed):
    sim = started()
    assert not sim.scheduler.flush_cache()
    pause(sim, mode)
    sim.scheduler.submit(submit("late", prompt(7, 3), 5))
    assert sim.scheduler.may_flush() == flushed == sim.scheduler.flush_cache()
    sim.scheduler.check_integrity()
    if flushed:
        assert sim.cache.allocator.num_free == sim.cache.total_pages
    sim.scheduler.resume()
    assert not sim.scheduler.flush_cache()  # now the one who waits counts
    sim.run()
    if mode != "abort":
        assert all(sim.outputs(item.rid) == solo(item, 5) for item in ITEMS)


def test_a_second_pause_does_what_its_mode_says_and_one_end_ends_both():
    sim = started()
    pause(sim, "in_place")
    assert not sim.scheduler.flush_cache()
    pause(sim, "retract")
    assert sim.scheduler.flush_cache()
    sim.scheduler.resume()
    sim.run()
    assert all(sim.outputs(item.rid) == solo(item, 5) for item in ITEMS)
    sim.scheduler.resume()  # without a pause: nothing
    assert not sim.scheduler.paused


def test_an_abort_ends_what_is_paused_at_once():
    sim = started()
    pause(sim, "in_place")
    for rid in ("runs", "cut", "waits"):
        sim.scheduler.abort(Abort(rid=rid))
        sim.scheduler.check_integrity()
    take(sim, sim.scheduler.drain())
    assert sim.free_and_cached() and not sim.scheduler.has_work
    assert [sim.finish(item.rid) for item in ITEMS] == ["abort"] * 3
    assert sim.scheduler.flush_cache()
    sim.scheduler.resume()


def test_an_unknown_mode_is_refused_and_changes_nothing():
    sim = started()
    with pytest.raises(RequestError) as caught:
        sim.scheduler.pause("gently")
    assert caught.value.param == "mode" and "in_place" in caught.value.message
    assert not sim.scheduler.paused
    sim.run()
    assert all(sim.outputs(item.rid) == solo(item, 5) for item in ITEMS)


@pytest.mark.parametrize(("mode", "every"), [("retract", 45), ("in_place", 7)])
def test_pauses_under_memory_pressure_leave_every_answer_as_it_was(mode, every):
    sim = crowded()
    items = busy_submits()
    for item in items:
        sim.scheduler.submit(item)
    pauses = 0

    def interrupt(step: int) -> None:
        nonlocal pauses
        if step % every == every - 1:
            pause(sim, mode)
            pauses += 1
            sim.scheduler.resume()

    sim.run(each=interrupt)
    assert pauses >= 4 and sim.scheduler.stats()["num_retracted_requests_total"] >= 1
    for i, item in enumerate(items):
        assert sim.outputs(item.rid) == solo(item, i)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_pause_counts_for_no_timeout():
    clock = Clock()
    sim = started(clock=clock, req_running_timeout=4.0, req_waiting_timeout=4.0)
    clock.now += 3.0
    pause(sim, "in_place")
    clock.now += 50.0
    late = submit("late", prompt(7, 3), 5, ignore_eos=True)
    sim.scheduler.submit(late)
    clock.now += 50.0
    sim.scheduler.resume()
    sim.tick()
    assert len(sim.scheduler._roster.requests) == 4
    clock.now += 2.0  # 5 of who was there, 2 of the latecomer
    sim.tick()
    assert [sim.finish(item.rid) for item in ITEMS] == ["abort"] * 3
    sim.run()
    assert sim.outputs("late") == solo(late, 5)
