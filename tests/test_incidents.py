"""Text-book incidents of a KV cache, planted into a running engine at a random moment: each is
noticed at the latest in the first tick without work, named, and survived.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import continuation, make_scheduler
from test_loop import Rig

from jserve.scheduler.scheduler import Scheduler
from jserve.types import Control, ControlReply, Gauges

Change = Callable[[Callable[..., Any], Scheduler], Callable[..., Any]]


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jserve.engine.loop.IDLE_WAIT", 0.001)


def dropped(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    return lambda *args: None


def doubled(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    def twice(*args: Any) -> Any:
        call(*args)
        return call(*args)

    return twice


def slot_lost(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    def vacate(row: Any) -> None:
        call(row)
        scheduler._roster.free_slots.remove(row.slot)

    return vacate


def pages_kept(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    def release(lease: Any) -> None:
        lease.num_pages = lease.num_shared
        call(lease)

    return release


def evicted_before_the_lock(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    def match(*args: Any) -> Any:
        found = call(*args)
        scheduler.cache.evict(scheduler.cache.total_pages)
        return found

    return match


def freed_while_in_use(call: Callable[..., Any], scheduler: Scheduler) -> Callable[..., Any]:
    def commit(lease: Any, tokens: Any) -> None:
        call(lease, tokens)
        scheduler.cache.allocator.free(lease.pages[lease.num_shared :])

    return commit


@dataclasses.dataclass(frozen=True)
class Fault:
    """`change` is done to one call of a method, of those for which `relevant(scheduler, *args)`."""

    owner: Callable[[Scheduler], Any]
    method: str
    change: Change
    named: str  # in the message of the check on idle
    relevant: Callable[..., object] = lambda *args: True


def unlocked_hit(scheduler: Scheduler, tokens: Any, space: Any) -> bool:
    tree = scheduler.cache.tree
    node, covered, _ = tree.find(tree.root, tokens, space)
    return covered > 0 and not node.lock_ref


TREE, CACHE = (lambda s: s.cache.tree), (lambda s: s.cache)
IN_TREE = lambda s, node: node.parent is not None  # noqa: E731
HAS_OWN = lambda s, lease, *_: lease.num_pages > lease.num_shared  # noqa: E731
FAULTS = {
    "a lock is never released": Fault(TREE, "unlock", dropped, "lock counts", IN_TREE),
    "a lock is taken twice": Fault(TREE, "lock", doubled, "lock counts", IN_TREE),
    "pages are never freed": Fault(CACHE, "release", pages_kept, "exactly one owner", HAS_OWN),
    "a slot is lost": Fault(lambda s: s._roster, "vacate", slot_lost, "slots="),
}
#: These may also be met by an assertion while requests run.
EARLY_FAULTS = {
    "a lock is released twice": Fault(TREE, "unlock", doubled, "lock counts", IN_TREE),
    "pages are freed twice": Fault(
        lambda s: s.cache.allocator,
        "free",
        doubled,
        "exactly one owner",
        lambda s, pages: len(pages),
    ),
    "pages are freed while in use": Fault(
        CACHE,
        "commit",
        freed_while_in_use,
        "exactly one owner",
        lambda s, lease, tokens: lease.num_pages > len(tokens) // s.cache.page_size,
    ),
    "a match is stale": Fault(
        TREE, "match", evicted_before_the_lock, "lock of an evicted node", unlocked_hit
    ),
}


class Plant:
    """Puts one fault into a scheduler; `fired` tells whether its moment has come."""

    def __init__(self, scheduler: Scheduler, fault: Fault, nth: int) -> None:
        self.fired = False
        owner = fault.owner(scheduler)
        call = getattr(owner, fault.method)
        changed = fault.change(call, scheduler)
        seen = 0

        def faulty(*args: Any) -> Any:
            nonlocal seen
            seen += bool(fault.relevant(scheduler, *args))
            if self.fired or seen < nth:
                return call(*args)
            self.fired = True
            return changed(*args)

        setattr(owner, fault.method, faulty)


class Engine(Rig):
    """A loop whose pool holds about three of its requests; `serve` starts ten and waits for all."""

    def __init__(self) -> None:
        super().__init__(scheduler=make_scheduler(num_pages=34, schedule_conservativeness=0.1))
        self.asked: dict[str, tuple[list[int], int]] = {}

    def serve(self, rng: random.Random, count: int = 10) -> None:
        first = len(self.asked)
        for i in range(first, first + count):
            shared = [rng.randrange(2)] * rng.choice([0, 12, 24, 24])
            self.asked[f"r{i}"] = ([*shared, *rng.choices(range(256), k=5)], rng.randint(1, 24))
            self.submit(f"r{i}", *self.asked[f"r{i}"])
            self.tick(rng.randrange(4))
        self.run_until_finished(*self.asked)
        for rid, (prompt, n) in self.asked.items():
            assert self.tokens(rid) == continuation(prompt, n), rid
            assert sum(delta.finish is not None for delta in self.deltas[rid]) == 1

    @property
    def failures(self) -> float:
        return self.scheduler.stats()["integrity_failures_total"]

    @property
    def resets(self) -> int:
        return self.runner.events.count(("reset", -1))


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Messages and the errors that came with them."""
    return [
        f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
        for record in caplog.records
        if record.levelno == level
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_never_given_back_is_noticed_in_the_first_tick_without_work(name, seed, caplog):
    engine, rng = Engine(), random.Random(seed)
    plant = Plant(engine.scheduler, FAULTS[name], nth=rng.randint(1, 9))
    engine.serve(rng)
    assert plant.fired
    engine.tick(3)  # the last launch comes in, then there is nothing to do
    assert engine.failures == 1 and engine.resets == 0
    messages = logged(caplog, logging.CRITICAL)
    assert len(messages) == 1 and FAULTS[name].named in messages[0], messages
    engine.scheduler.check_integrity()
    engine.serve(rng)
    engine.tick(3)
    assert engine.failures == 1, "what was wrong has been put right"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", EARLY_FAULTS)
def test_what_is_given_back_too_early_is_noticed_and_costs_no_request(name, seed, caplog):
    engine, rng = Engine(), random.Random(seed)
    plant = Plant(engine.scheduler, EARLY_FAULTS[name], nth=rng.randint(1, 3))
    engine.serve(rng, 20)
    assert plant.fired
    engine.tick(3)
    assert engine.failures + engine.resets == 1, (engine.failures, engine.resets)
    named = ("unlock without lock", "not owned", "num_free", EARLY_FAULTS[name].named)
    messages = [*logged(caplog, logging.CRITICAL), *logged(caplog, logging.ERROR)]
    assert len(messages) == 1 and any(text in messages[0] for text in named), messages
    engine.scheduler.check_integrity()


def test_a_reference_that_a_paused_request_has_lost_is_noticed_at_once(caplog):
    engine = Engine()
    engine.submit("a", [1] * 22, 20)
    engine.tick(5)
    (lease,) = engine.scheduler.cache.leases
    engine.api.send(Control(id="1", op="pause_generation", args={"mode": "in_place"}))
    engine.tick(1)
    assert not engine.failures
    engine.scheduler.resume()
    engine.tick(2)
    engine.scheduler.cache.tree.unlock(lease.node)
    engine.api.send(Control(id="2", op="pause_generation", args={"mode": "in_place"}))
    engine.tick(1)
    assert engine.failures == 1
    assert "lock counts (held, live leases): [(0, 1)]" in logged(caplog, logging.CRITICAL)[0]
    engine.scheduler.resume()
    engine.run_until_finished("a")
    assert engine.tokens("a") == continuation([1] * 22, 20)


def test_every_failure_counts_in_the_metrics_and_none_uses_up_the_devices_reset():
    engine = Engine()
    for n in range(1, 4):
        engine.serve(random.Random(n), count=3)
        engine.scheduler.cache.allocator.allocate(1)
        engine.submit("last", [1], 1)
        engine.run_until_finished("last")
        engine.deltas.pop("last")
        engine.tick(4)
        assert engine.failures == n
    told = [message for message in engine.other if isinstance(message, Gauges)]
    assert told[-1].values["integrity_failures_total"] == 3
    calls = sum(name == "launch" for name, _ in engine.runner.events)
    engine.runner.fail = {("launch", calls + 3)}
    engine.serve(random.Random(9))
    assert engine.resets == 1


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("mode", [None, "retract", "in_place"])
def test_a_flush_that_is_the_first_to_meet_a_fault_costs_neither_the_reset_nor_a_request(
    name, mode, caplog
):
    """In a pause requests wait for its end; their KV is in the way of a flush, but not of what
    starts over."""
    engine = Engine()
    plant = Plant(engine.scheduler, FAULTS[name], nth=1)
    engine.submit("a", [1] * 22, 6)
    engine.run_until_finished("a")
    if mode is not None:
        engine.submit("b", [2] * 9, 8)
        engine.tick(3)
        engine.api.send(Control(id="pause", op="pause_generation", args={"mode": mode}))
    engine.api.send(Control(id="flush", op="flush_cache"))
    engine.tick()
    assert plant.fired and engine.failures == 1 and engine.resets == 0
    replies = {one.id: one.ok for one in engine.other if isinstance(one, ControlReply)}
    assert replies["flush"] is True
    messages = logged(caplog, logging.CRITICAL)
    assert len(messages) == 1 and FAULTS[name].named in messages[0], messages
    engine.scheduler.check_integrity()
    assert engine.scheduler.stats()["kv_evictable_tokens"] == 0
    if mode is not None:
        engine.scheduler.resume()
        engine.run_until_finished("b")
        assert engine.tokens("b") == continuation([2] * 9, 8)
    engine.tick(3)
    calls = sum(event == "launch" for event, _ in engine.runner.events)
    engine.runner.fail = {("launch", calls + 3)}
    engine.serve(random.Random(1))
    assert engine.resets == 1, "the device's reset was left"


def test_a_request_that_is_over_does_not_run_again_when_its_pages_are_in_disorder():
    engine = Engine()
    engine.submit("a", [1] * 9, 6)
    engine.tick(3)
    finish, failed = engine.scheduler.cache.finish, []

    def broken(*args: Any) -> None:
        if not failed:
            failed.append(True)
            raise AssertionError("planted")
        finish(*args)

    engine.scheduler.cache.finish = broken  # type: ignore[method-assign]
    engine.run_until_finished("a")
    assert engine.resets == 1 and failed
    assert engine.tokens("a") == continuation([1] * 9, 6)
    engine.tick(3)
    assert engine.scheduler.idle and not engine.failures
