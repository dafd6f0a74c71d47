"""Priorities: who goes first, who gives way, and how long anybody may take."""

from __future__ import annotations

import msgspec
import pytest
from scripted_runner import Simulation, prompt, solo, submit
from test_window_scheduler import windowed

from jserve.errors import QueueFullError, RequestError
from jserve.types import Submit

RANKED = {"enable_priority_scheduling": True, "eos_token_ids": ()}


def ranked(**settings) -> Simulation:
    return Simulation(**(RANKED | settings))


def admitted(sim: Simulation) -> list[str]:
    sim.run()
    return [edit_row.request.rid for plan in sim.plans for edit_row in edited(plan)]


def edited(plan) -> list:
    slots = {edit.slot for edit in plan.edits}
    return [row for row in plan.rows if row.slot in slots]


def offer(sim: Simulation, *items: Submit) -> None:
    for item in items:
        sim.scheduler.submit(item)


def answers_are_whole(sim: Simulation, *items: Submit) -> None:
    for item in items:
        sampling = msgspec.structs.replace(item.sampling, ignore_eos=True)
        alone = solo(msgspec.structs.replace(item, sampling=sampling), 5)
        assert sim.outputs(item.rid) == alone, item.rid
    assert sim.free_and_cached() and sim.scheduler.idle


def running(sim: Simulation) -> set[str]:
    return {row.request.rid for row in sim.scheduler._roster.residents}


def preempted(sim: Simulation) -> int:
    return int(sim.scheduler.stats()["num_preempted_requests_total"])


# ---- order ----


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, ["d", "b", "e", "a", "c"]),
        ({"default_priority_value": 3}, ["d", "c", "b", "e", "a"]),
        ({"schedule_low_priority_values_first": True}, ["a", "b", "e", "d", "c"]),
        (
            {"schedule_low_priority_values_first": True, "default_priority_value": 0},
            ["a", "c", "b", "e", "d"],
        ),
        ({"enable_priority_scheduling": False}, ["a", "b", "c", "d", "e"]),
    ],
)
def test_larger_priorities_go_first_then_arrival_and_who_has_none_has_the_default(settings, order):
    sim = ranked(num_slots=1, **settings)
    for rid, priority in (("a", -5), ("b", 2), ("c", None), ("d", 7), ("e", 2)):
        offer(sim, submit(rid, prompt(5, ord(rid)), 2, priority=priority))
    assert admitted(sim) == order


def test_lof_orders_by_output_length_among_equal_priorities():
    sim = ranked(policy="lof", num_slots=1)
    for rid, new, priority in (("a", 2, 0), ("b", 9, 0), ("c", 3, 1), ("d", 5, 1)):
        offer(sim, submit(rid, prompt(5, ord(rid)), new, priority=priority))
    assert admitted(sim) == ["d", "c", "b", "a"]


def test_a_priority_can_be_refused_where_it_would_not_order_the_queue():
    sim = Simulation(abort_on_priority_when_disabled=True)
    with pytest.raises(RequestError) as caught:
        offer(sim, submit("a", prompt(5), 2, priority=0))
    assert caught.value.param == "priority" and "--enable-priority" in caught.value.message
    offer(sim, submit("b", prompt(5), 2))
    sim.run()
    assert sim.finish("b") == "length" and "a" not in sim.deltas


def test_the_cache_hears_of_the_priority_with_and_without_priority_scheduling():
    for enabled in (True, False):
        sim = Simulation(enable_priority_scheduling=enabled)
        offer(sim, submit("a", prompt(5), 2, priority=4), submit("b", prompt(5, 1), 2))
        sim.tick()
        assert sorted(lease.priority for lease in sim.cache.leases) == [0, 4]
        sim.run()


def test_a_request_that_goes_before_the_others_is_tried_although_the_next_one_found_no_room():
    sim = ranked(num_pages=15, schedule_conservativeness=0.0, disable_priority_preemption=True)
    offer(sim, submit("old", prompt(12), 20))
    sim.tick()
    offer(sim, submit("large", prompt(30, 1), 20))
    for _ in range(2):
        sim.tick()
    assert running(sim) == {"old"} and sim.scheduler._roster.full
    offer(sim, submit("small", prompt(4, 2), 4, priority=1))
    sim.tick()
    assert running(sim) == {"old", "small"}
    sim.run()


# ---- preemption ----


def test_a_slot_is_taken_from_the_lowest_priority_and_among_equals_from_the_newest():
    sim = ranked(num_slots=3)
    old = [submit(rid, prompt(6, i), 30, priority=p) for i, (rid, p) in enumerate(LOW)]
    offer(sim, *old)
    for _ in range(6):
        sim.tick()
    high = submit("high", prompt(6, 9), 4, priority=50)
    offer(sim, high)
    for _ in range(2):
        sim.tick()
    assert running(sim) == {"a", "b", "high"} and preempted(sim) == 1
    sim.run()
    answers_are_whole(sim, *old, high)
    assert [sim.deltas[rid][-1].num_retractions for rid in "abc"] == [0, 0, 1]
    assert sim.scheduler.stats()["num_retracted_requests_total"] == 0
    done = [d for plan in sim.plans for d in edited(plan)]
    assert [row.request.rid for row in done] == ["a", "b", "c", "high", "c"]


LOW = (("a", 5), ("b", 0), ("c", 0))


def test_each_of_several_requests_gets_the_slot_that_it_needs():
    sim = ranked(num_slots=3)
    old = [submit(rid, prompt(6, i), 30, priority=p) for i, (rid, p) in enumerate(LOW)]
    offer(sim, *old)
    for _ in range(4):
        sim.tick()
    high = [submit(f"h{i}", prompt(6, 9 + i), 6, priority=50) for i in range(3)]
    offer(sim, *high)
    for _ in range(4):
        sim.tick()
    assert running(sim) == {"h0", "h1", "h2"} and preempted(sim) == 3
    sim.run()
    answers_are_whole(sim, *old, *high)


@pytest.mark.parametrize(("priority", "threshold", "taken"), [(10, 10, 0), (11, 10, 1), (1, 0, 1)])
def test_only_a_priority_lower_by_more_than_the_threshold_gives_way(priority, threshold, taken):
    sim = ranked(num_slots=1, priority_scheduling_preemption_threshold=threshold)
    low = submit("low", prompt(6), 12, priority=0)
    high = submit("high", prompt(6, 1), 3, priority=priority)
    offer(sim, low)
    for _ in range(3):
        sim.tick()
    offer(sim, high)
    sim.run()
    answers_are_whole(sim, low, high)
    assert preempted(sim) == taken


def test_who_has_no_priority_gives_way_to_anybody_who_has_one():
    sim = ranked(num_slots=1)
    offer(sim, submit("none", prompt(6), 12))
    for _ in range(3):
        sim.tick()
    offer(sim, submit("some", prompt(6, 1), 3, priority=-100))
    sim.run()
    assert preempted(sim) == 1 and sim.deltas["none"][-1].num_retractions == 1


def test_nobody_gives_way_when_preemption_is_off():
    sim = ranked(num_slots=1, disable_priority_preemption=True)
    offer(sim, submit("low", prompt(6), 12, priority=0))
    for _ in range(3):
        sim.tick()
    offer(sim, submit("high", prompt(6, 1), 3, priority=100))
    sim.run()
    assert preempted(sim) == 0


def test_pages_are_taken_from_as_few_as_it_takes():
    """Three hold 6 pages each of 25; the candidate needs more than 8."""
    sim = ranked(
        num_pages=26,
        chunked_prefill_size=96,
        max_prefill_tokens=96,
        schedule_conservativeness=0.0,
    )
    low = [submit(f"l{i}", prompt(21, i), 3 + i, priority=i) for i in range(3)]
    offer(sim, *low)
    sim.tick()
    assert len(running(sim)) == 3 and sim.cache.available_pages == 7
    high = submit("high", prompt(24, 9), 4, priority=50)
    offer(sim, high)
    for _ in range(2):
        sim.tick()
    assert preempted(sim) == 1 and running(sim) == {"l1", "l2", "high"}
    sim.run()
    answers_are_whole(sim, *low, high)


def test_nobody_gives_way_in_vain():
    """What the one of low priority holds would not do beside the other."""
    sim = ranked(num_pages=24, chunked_prefill_size=96, max_prefill_tokens=96)
    low = submit("low", prompt(8), 12, priority=0)
    peer = submit("peer", prompt(40, 1), 8, priority=50)
    offer(sim, low, peer)
    for _ in range(3):
        sim.tick()
    high = submit("high", prompt(60, 2), 4, priority=50)
    offer(sim, high)
    for _ in range(4):
        sim.tick()
        assert running(sim) == {"low", "peer"}
    sim.run()
    assert preempted(sim) == 0
    answers_are_whole(sim, low, peer, high)


def test_pages_that_somebody_else_uses_too_are_not_counted_as_gained():
    """`low` shares its 10 pages with `peer`: without it there are no more than before."""
    sim = ranked(num_pages=20, chunked_prefill_size=96, max_prefill_tokens=96)
    peer = submit("peer", prompt(40), 20, priority=50, ignore_eos=True)
    offer(sim, peer)
    sim.tick()
    low = submit("low", [*prompt(40), 1], 3, priority=0)
    offer(sim, low)
    sim.tick()
    assert running(sim) == {"low", "peer"}
    offer(sim, high := submit("high", prompt(30, 2), 4, priority=50))
    sim.run()
    assert preempted(sim) == 0
    answers_are_whole(sim, low, peer, high)


def test_a_long_prompt_gives_way_between_two_chunks_and_is_waited_for_when_it_may_stay():
    for priority, taken in ((0, 1), (45, 0)):
        sim = ranked(num_slots=1, chunked_prefill_size=8)
        long = submit("long", prompt(60), 4, priority=priority)
        offer(sim, long)
        for _ in range(3):
            sim.tick()
        assert sim.scheduler._roster.chunked is not None
        offer(sim, high := submit("high", prompt(6, 1), 3, priority=50))
        sim.run()
        assert preempted(sim) == taken
        answers_are_whole(sim, long, high)


@pytest.mark.parametrize("disabled", [True, False])
def test_window_pages_are_taken_too(disabled):
    """The full pool has plenty; the window pool is short."""
    sim, group = windowed(16, 30, num_pages=100, disable_priority_preemption=disabled, **RANKED)
    low = [submit(f"l{i}", prompt(9, i), 40, priority=i) for i in range(3)]
    for item in low:
        offer(sim, item)
        for _ in range(8):
            sim.tick()
    assert running(sim) == {"l0", "l1", "l2"}
    high = submit("high", prompt(30, 9), 4, priority=50)
    offer(sim, high)
    for _ in range(3):
        sim.tick()
    assert running(sim) == ({"l0", "l1", "l2"} if disabled else {"l1", "l2", "high"})
    sim.run()
    assert preempted(sim) == (not disabled)
    answers_are_whole(sim, *low, high)
    assert group.available == group.allocator.total


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_under_a_stream_of_priorities_every_answer_is_its_solo_run(depth, mixed):
    sim = ranked(num_pages=30, num_slots=3, depth=depth, mixed=mixed, schedule_conservativeness=0.1)
    items = [
        submit(f"r{i}", prompt(5 + i % 17, i % 4), 6 + i % 9, priority=i * 37 % 60, sampling_seed=5)
        for i in range(40)
    ]
    todo = iter(items)

    def more(step: int) -> None:
        if step % 3 == 0 and (item := next(todo, None)) is not None:
            offer(sim, item)

    offer(sim, next(todo))
    while sim.scheduler.has_work or sim.queue or len(sim.deltas) < len(items):
        more(len(sim.plans))
        sim.tick()
    answers_are_whole(sim, *items)
    assert preempted(sim) >= 3


# ---- memory pressure ----


@pytest.mark.parametrize(("policy", "first"), [("length", "late"), ("priority", "low")])
def test_retraction_takes_the_lowest_priority_first_under_that_policy(policy, first):
    sim = ranked(
        num_pages=18,
        schedule_conservativeness=0.0,
        retraction_policy=policy,
        disable_priority_preemption=True,
    )
    offer(sim, submit("low", prompt(8), 40, priority=0))
    for _ in range(6):
        sim.tick()
    offer(sim, submit("late", prompt(8, 1), 30, priority=5))
    gone: list[str] = []

    def watch(_: int) -> None:
        waiting = [r.rid for r in sim.scheduler._roster.waiting if r.num_retractions]
        gone.extend(rid for rid in waiting if rid not in gone)

    sim.run(each=watch)
    assert gone[0] == first and sim.scheduler.stats()["num_retracted_requests_total"] >= 1


def test_a_retraction_evicts_twenty_tokens_for_each_who_stays():
    sim = ranked(num_pages=26, num_slots=3, schedule_conservativeness=0.0)
    for i in range(3):
        offer(sim, submit(f"r{i}", prompt(8, i), 40))
        sim.tick()
    cache, before = sim.cache, []
    while not sim.scheduler.stats()["num_retracted_requests_total"]:
        before = [cache.tree.evictable_pages, cache.counters.evicted_pages]
        sim.tick()
    gained = cache.counters.evicted_pages - before[1]
    assert before[0] == 0 and gained == 2, "its own two whole pages of prompt"
    sim.run()


# ---- budgets, limits of the queue and of time ----


def test_a_step_takes_in_no_more_prompts_than_it_may():
    for most, counts in ((1, [1, 1, 1]), (2, [2, 1]), (None, [3])):
        sim = Simulation(prefill_max_requests=most, chunked_prefill_size=64)
        offer(sim, *(submit(rid, prompt(5, ord(rid)), 9) for rid in "abc"))
        sim.run()
        assert [len(plan.edits) for plan in sim.plans if plan.edits] == counts


def test_a_full_queue_drops_its_last_for_a_strictly_higher_priority():
    sim = ranked(max_queued=2)
    offer(sim, *(submit(rid, prompt(5, ord(rid)), 2, priority=p) for rid, p in QUEUED))
    for priority in (None, 1):
        with pytest.raises(QueueFullError, match="The request queue is full"):
            offer(sim, submit("same", prompt(5), 2, priority=priority))
    offer(sim, submit("d", prompt(5), 2, priority=2))
    sim.run()
    finish = sim.deltas["c"][-1].finish
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 503)
    assert finish.message == "The request is aborted by a higher priority request."
    assert {rid: sim.finish(rid) for rid in sim.deltas} == {
        **dict.fromkeys("bd", "length"),
        "c": "abort",
    }


QUEUED = (("b", 1), ("c", 1))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_waits_too_long_gets_a_503_and_nobody_else_does():
    clock = Clock()
    sim = Simulation(clock=clock, num_slots=1, req_waiting_timeout=5.0)
    offer(sim, submit("runs", prompt(5), 60, ignore_eos=True), submit("waits", prompt(5, 1), 4))
    sim.tick()
    clock.now += 4.9
    offer(sim, submit("late", prompt(5, 2), 4))
    sim.tick()
    assert "waits" not in sim.deltas
    clock.now += 0.5
    sim.tick()
    finish = sim.deltas["waits"][-1].finish
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 503)
    assert finish.message and "5 s" in finish.message and "--req-waiting-timeout" in finish.message
    sim.run()
    assert sim.finish("runs") == sim.finish("late") == "length"
    assert sim.scheduler.stats()["num_waiting_timeouts_total"] == 1


def test_the_wait_for_a_grammar_is_part_of_the_wait_in_the_queue():
    clock = Clock()
    sim = Simulation(clock=clock, num_slots=1, req_waiting_timeout=5.0)
    bound = msgspec.structs.replace(submit("bound", prompt(5, 1), 4), waited=4.0)
    late = msgspec.structs.replace(submit("late", prompt(5, 2), 60, ignore_eos=True), waited=4.9)
    offer(sim, late)
    sim.tick()
    offer(sim, bound)
    clock.now += 0.9
    sim.tick()
    assert "bound" not in sim.deltas
    clock.now += 0.3
    sim.tick()
    finish = sim.deltas["bound"][-1].finish
    assert finish is not None and finish.status_code == 503
    sim.run()
    assert sim.finish("late") == "length"


def test_who_runs_too_long_ends_at_once_with_what_it_has():
    clock = Clock()
    sim = Simulation(clock=clock, num_slots=2, req_running_timeout=3.0)
    offer(sim, submit("long", prompt(5), 60, ignore_eos=True), submit("cut", prompt(60, 1), 9))
    for _ in range(3):
        sim.tick()
    assert sim.scheduler._roster.chunked is not None
    clock.now += 2.0
    sim.tick()
    assert len(running(sim)) == 2
    clock.now += 1.5
    sim.scheduler.plan()
    assert not running(sim) and sim.free_and_cached()
    sim.queue.clear()
    for delta in sim.scheduler.drain():
        assert delta.finish is not None and delta.finish.status_code == 503
        assert delta.finish.message and "--req-running-timeout" in delta.finish.message
        whole = solo(submit("x", prompt(5), 60, ignore_eos=True), 5)
        assert delta.token_ids == whole[: len(delta.token_ids)]
    assert sim.scheduler.stats()["num_running_timeouts_total"] == 2


def jumped(sim: Simulation, rid: str) -> None:
    """It is given two tokens that it has not drawn, and waits to have them computed."""
    request = sim.scheduler._roster.requests[rid]
    sim.scheduler.jump(request, [next(iter(request.output_ids))] * 2)
    assert request.row is None and request in sim.scheduler._roster.waiting


def test_jumps_do_not_begin_a_new_run():
    clock = Clock()
    sim = Simulation(clock=clock, num_slots=1, req_running_timeout=3.0, req_waiting_timeout=1.0)
    offer(sim, submit("a", prompt(5), 60, ignore_eos=True))
    for _ in range(4):
        for _ in range(3):
            sim.tick()
        clock.now += 0.7
        sim.tick()
        jumped(sim, "a")
    assert not any(delta.finish for delta in sim.deltas.get("a", []))
    sim.tick()
    clock.now += 0.5
    sim.scheduler.plan()
    sim.queue.clear()
    (delta,) = [delta for delta in sim.scheduler.drain() if delta.finish is not None]
    assert delta.finish is not None and "--req-running-timeout" in (delta.finish.message or "")
    assert sim.scheduler.stats()["num_running_timeouts_total"] == 1
    assert sim.scheduler.stats()["num_jump_forward_tokens_total"] == 8


def test_a_retraction_after_a_jump_begins_a_new_stay_too():
    clock = Clock()
    sim = Simulation(clock=clock, num_slots=1, req_running_timeout=3.0)
    offer(sim, submit("a", prompt(5), 30, ignore_eos=True))
    for _ in range(3):
        sim.tick()
    clock.now += 2.0
    jumped(sim, "a")
    sim.tick()
    sim.scheduler.pause("retract")
    sim.scheduler.resume()
    clock.now += 2.0
    sim.run()
    assert sim.finish("a") == "length"


def test_who_jumps_holds_no_place_in_the_queue_and_is_never_dropped_from_it():
    sim = ranked(max_queued=1, num_slots=1, disable_priority_preemption=True)
    offer(sim, submit("runs", prompt(5), 30, ignore_eos=True, priority=1))
    for _ in range(3):
        sim.tick()
    jumped(sim, "runs")
    offer(sim, submit("queued", prompt(5, 1), 2, priority=2))
    with pytest.raises(QueueFullError, match="The request queue is full"):
        offer(sim, submit("one more", prompt(5, 2), 2, priority=2))
    offer(sim, submit("first", prompt(5, 3), 2, priority=3))
    sim.run()
    assert {rid: sim.finish(rid) for rid in ("runs", "queued", "first")} == {
        "runs": "length",
        "queued": "abort",
        "first": "length",
    }


def test_what_is_told_of_a_long_queue_is_not_counted_in_it():
    """Neither a step's log line nor the gauges may take time that grows with the queue."""
    sim = ranked()
    queue = sim.scheduler._roster.waiting
    for i in range(30):
        priority = (None, 2, 2, 5)[i % 4]
        offer(sim, submit(f"r{i}", prompt(5 + i % 3, i), 2, priority=priority))
    looked_at = []

    class Watched(list):
        def __iter__(self):
            raise AssertionError("the whole queue is read")

        def __getitem__(self, at):
            looked_at.append(at)
            return super().__getitem__(at)

    sim.scheduler._roster.waiting = Watched(queue)
    stats = sim.scheduler.stats()
    assert stats["num_waiting_tokens"] == sum(len(one.prompt) for one in queue)
    assert stats["num_queue_reqs"] == 30 and len(looked_at) < 25
    by_mark = {name: n for name, n in stats.items() if name.startswith("num_queue_reqs#")}
    assert by_mark.pop("num_queue_reqs#2") == 15 and by_mark.pop("num_queue_reqs#5") == 7
    assert sum(by_mark.values()) in (0, 8)
    sim.scheduler._roster.waiting = queue
    sim.run()
    stats = sim.scheduler.stats()
    assert stats["num_waiting_tokens"] == 0 == stats["num_retracted_reqs"]


def test_a_retracted_request_begins_a_new_stay():
    clock = Clock()
    sim = Simulation(
        clock=clock, num_slots=2, req_running_timeout=3.0, req_waiting_timeout=3.0, num_pages=30
    )
    item = submit("a", prompt(5), 20, ignore_eos=True)
    offer(sim, item)
    for _ in range(3):
        sim.tick()
    clock.now += 2.0
    sim.scheduler.pause("retract")
    sim.scheduler.resume()
    clock.now += 2.0
    sim.tick()
    clock.now += 2.0
    sim.run()
    assert sim.finish("a") == "length" and sim.outputs("a") == solo(item, 5)
