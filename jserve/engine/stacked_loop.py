"""The tick of --enable-dp-attention: each rank decides and records for itself, one program computes
for all.

    [plan(N+1) of each] → launch(N+1) → read(N) → [commit(N) of each] → finish(N+1)

As loop.py, whose parts each rank has; only the order is here, who gets which request, and what a
failure costs: a refused request is told so; a failed step resets all ranks, once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jserve.engine.channel import EngineEnd
from jserve.engine.loop import IDLE_WAIT, STALL_WAIT
from jserve.engine.merging import merged_facts
from jserve.engine.placement import Placement
from jserve.engine.ranks import Front
from jserve.engine.recovery import Recovery
from jserve.engine.refusals import refused
from jserve.engine.stacked_rank import RankParts, StackedRank
from jserve.engine.watchdog import start_watchdogs
from jserve.types import Deltas, Progress, Submit, ToEngine

if TYPE_CHECKING:
    from jserve.runner.stacked import Plans, StackedInFlight, StackedRunner


class StackedLoop:
    """One engine of several ranks, on one thread, which dispatches everything that touches devices.

    Args as Loop's, but `ranks`. `facts` are those of all.
    """

    def __init__(
        self,
        ranks: Sequence[RankParts],
        runner: StackedRunner,
        channel: EngineEnd,
        placement: Placement,
        *,
        depth: int,
        page_size: int = 1,
        decode_log_interval: int = 40,
        watchdog_timeout: float = 0.0,
        soft_watchdog_timeout: float = 0.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._stopping = False
        self._runner, self._channel, self._depth = runner, channel, depth
        self._placement = placement
        self._timeouts, self._on_close = (watchdog_timeout, soft_watchdog_timeout), on_close
        self._busy_since: float | None = None  # None: resting
        self._queue: deque[tuple[Plans, StackedInFlight, float | None]] = deque()
        self._recover = Recovery(self._requeue, runner, self._queue)
        self._ranks = [
            StackedRank(
                parts,
                drain=self._drain,
                stop=self._stop,
                page_size=page_size,
                decode_log_interval=decode_log_interval,
            )
            for parts in ranks
        ]
        watch = ranks[0].scheduler.cache.counters.timing.watch  # a step counts once
        self._launch = watch("execution_launch_seconds", lambda plans: runner.launch(plans))
        self._read = watch("execution_read_seconds", lambda flight: flight.read())
        self._finish = watch("output_sample_seconds", lambda *step: runner.finish(*step))
        self._inbox: deque[ToEngine] = deque()
        self._front = Front([rank.channel for rank in self._ranks], placement)
        for parts in ranks:
            self._front.receive(parts.rank, [Progress(stage="ready", payload=parts.facts)])
        self._front.drain()  # it knows their names now; who builds this tells that it is ready
        self.facts = merged_facts([parts.facts for parts in ranks])

    def run(self, on_hang: Callable[[], None]) -> None:
        """As Loop.run."""
        stop_watching = start_watchdogs(*self._timeouts, lambda: self._busy_since, on_hang)
        try:
            while not self._stopping:
                self.tick()
        finally:
            stop_watching()
            self._queue.clear()
            self._runner.close()
            self._on_close()

    def tick(self) -> None:
        self._busy_since = time.monotonic()
        self._inbox.extend(self._channel.drain())
        try:
            while self._inbox:
                self._deal(self._inbox.popleft())
            for rank in self._ranks:
                rank.take_in()
            worked = self._step()
            rested = [] if worked else [rank.rest() for rank in self._ranks]
            idle = all(rested)
        except Exception as error:  # the loop's top
            worked = idle = True
            self._recover(error)
        self._pass_on()
        if not (worked or self._stopping or self._front.flushing):
            self._busy_since = None
            self._channel.wait(IDLE_WAIT if idle else STALL_WAIT)

    def _deal(self, message: ToEngine) -> None:
        try:
            self._front.send(message)
        except Exception as error:  # a rank that there is not: one bad request
            if not isinstance(message, Submit):
                raise
            self._channel.send(Deltas(items=[refused(message, error)]))

    def _step(self) -> bool:
        """One turn of the queue; False when there was nothing to launch and nothing to read."""
        plans = [rank.plan() for rank in self._ranks]
        flight = None if all(plan is None for plan in plans) else self._launch(plans)
        recorded = bool(self._queue) and (flight is None or len(self._queue) >= self._depth)
        if recorded:
            self._record()
        if flight is None:
            return recorded
        masks = [rank.mask(plan) for rank, plan in zip(self._ranks, plans, strict=True)]
        self._finish(flight, masks)
        self._queue.append((plans, flight, self._busy_since))
        if len(self._queue) > self._depth:  # depth 0
            self._record()
        return True

    def _record(self) -> None:
        plans, flight, begun = self._queue.popleft()
        parts = zip(self._ranks, plans, self._read(flight), strict=True)
        for rank, plan, outcome in parts:
            if plan is not None and outcome is not None:
                rank.commit(plan, outcome, begun or 0.0)
            else:
                rank.stand_by()

    def _pass_on(self) -> None:
        """What the ranks have said, as one engine's."""
        for index, rank in enumerate(self._ranks):
            self._front.receive(index, rank.channel.drain())
        for message in self._front.drain():
            self._channel.send(message)

    def _requeue(self) -> None:
        """All ranks have lost what they had computed."""
        for rank in self._ranks:
            rank.reset()
        self._placement.forget()

    def _drain(self) -> None:
        while self._queue:
            self._record()

    def _stop(self) -> None:
        self._stopping = True
