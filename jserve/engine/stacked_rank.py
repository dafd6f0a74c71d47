"""One rank of a StackedLoop: a scheduler, and what loop.py keeps around one.

It is told things over a channel of its own and answers over it, as an engine by itself would: what
makes one engine of several is ranks.Front's business. Knows no other rank and no step of theirs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jserve.engine.channel import ApiEnd
from jserve.engine.controls import Controls
from jserve.engine.gauges import GaugeSender
from jserve.engine.integrity import check_integrity
from jserve.engine.local import local_ends
from jserve.engine.loop import Masks
from jserve.engine.refusals import refused
from jserve.engine.step_log import StepLog
from jserve.plan import StepOutcome, StepPlan
from jserve.types import Abort, Control, Delta, Deltas, Submit, ToEngine

if TYPE_CHECKING:
    from jserve.engine.measured import Measured
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class RankParts:
    """`rank`: its number; `measured`: the runner's numbers, as far as they are this rank's;
    `facts`: what its `server_info` answers beside these and the scheduler's."""

    rank: int
    scheduler: Scheduler
    masks: Masks
    measured: Measured
    facts: dict[str, Any]


class StackedRank:
    """`channel` is the other end of its own. `drain` takes in every launch in flight, `stop` ends
    the loop."""

    def __init__(
        self,
        parts: RankParts,
        *,
        drain: Callable[[], None],
        stop: Callable[[], None],
        page_size: int,
        decode_log_interval: int,
    ) -> None:
        self.channel: ApiEnd
        self.channel, self._engine_end = local_ends()
        self.scheduler = scheduler = parts.scheduler
        watch = scheduler.cache.counters.timing.watch
        process = "per_stage_req_latency_seconds/request_process"
        self._accept = watch(process, lambda submit: scheduler.submit(submit))
        self._plan = watch("execution_plan_seconds", lambda: scheduler.plan())
        self._commit = watch("execution_commit_seconds", lambda *step: scheduler.commit(*step))
        self._masks = watch("output_mask_seconds", parts.masks)
        self._inbox: deque[ToEngine] = deque()
        self._gauges = GaugeSender(scheduler, parts.measured, self._engine_end)
        self._log = StepLog(scheduler, page_size, decode_log_interval, parts.rank)
        self._unchecked = True  # integrity, since the last step
        numbers, facts = self._gauges.values, parts.facts
        controls = Controls(self._engine_end, scheduler, drain, numbers, facts, stop)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: scheduler.abort,
            Control: controls.answer,
        }

    def take_in(self) -> None:
        """What it was told since."""
        self._inbox.extend(self._engine_end.drain())
        while self._inbox:
            message = self._inbox.popleft()
            self._handlers[type(message)](message)

    def plan(self) -> StepPlan | None:
        """Its part of the next step. Without one, it rests while the others work."""
        plan = self._plan()
        if plan is None:
            self.send(self.scheduler.drain())
            if self._unchecked and self.scheduler.idle:
                self.rest()
        return plan

    def mask(self, plan: StepPlan | None) -> np.ndarray | None:
        return self._masks(plan) if plan is not None and plan.constrained else None

    def commit(self, plan: StepPlan, outcome: StepOutcome, begun: float) -> None:
        """Its part of the oldest launch is read; `begun` as StepLog.step has it."""
        self._unchecked = True
        self.send(self._commit(plan, outcome))
        self._gauges.step()
        if logger.isEnabledFor(logging.INFO):
            self._log.step(plan, begun)

    def stand_by(self) -> None:
        """The step was the others'; the first rank tells what all have in common."""
        self._gauges.step()

    def rest(self) -> bool:
        """Nothing is in flight for it; whether it has nothing to do either."""
        self.send(self.scheduler.drain())
        if idle := self.scheduler.idle:
            self._gauges.rest()
        if self._unchecked:
            self._unchecked = False
            self.send(check_integrity(self.scheduler))
        return idle

    def reset(self) -> None:
        """The device has lost its pages: what was running is queued again."""
        self.send(self.scheduler.reset_device())

    def send(self, deltas: list[Delta]) -> None:
        if deltas:
            self._engine_end.send(Deltas(items=deltas))

    def _submit(self, message: Submit) -> None:
        try:
            self._accept(message)
        except Exception as error:  # one bad request must not end the others
            self.send([refused(message, error)])
