"""The tick: decide, compute, record, finish. The one file that holds both scheduler and runner.

    plan(N+1) → launch(N+1) → read(N) → commit(N) → send → finish(N+1)

`depth` launches stay in the queue (0: every step is read at once): that is the whole overlap
scheduler. Here is only the order, and what a failure costs: a refused request is told so; a failed
step resets the device, once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jserve.engine.channel import EngineEnd
from jserve.engine.controls import Controls
from jserve.engine.gauges import GaugeSender
from jserve.engine.integrity import check_integrity
from jserve.engine.recovery import Recovery
from jserve.engine.refusals import refused
from jserve.engine.step_log import StepLog
from jserve.engine.watchdog import start_watchdogs
from jserve.plan import StepPlan
from jserve.types import Abort, Control, Delta, Deltas, Submit, ToEngine

if TYPE_CHECKING:
    from jserve.runner.runner import InFlight, Runner
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")

IDLE_WAIT = 1.0  # seconds on the channel when there is nothing to do
STALL_WAIT = 0.002  # … when requests wait but none can be planned

Masks = Callable[[StepPlan], np.ndarray | None]  # asked for between token N and the draw of N+1


class Loop:
    """One engine. One thread runs it and dispatches everything that touches the device.

    Args:
        depth: launches that may be in flight when a tick ends; the scheduler's lookahead.
        decode_log_interval: decode steps between two log lines.
        facts: what `server_info` answers beside the scheduler's numbers.
        watchdog_timeout: seconds that a tick may take; 0 is no watchdog.
        soft_watchdog_timeout: … until all stacks are logged, and nothing else happens.
        on_close: called when `run` ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        channel: EngineEnd,
        *,
        depth: int,
        page_size: int = 1,
        decode_log_interval: int = 40,
        masks: Masks = lambda plan: None,
        facts: dict[str, Any] | None = None,
        watchdog_timeout: float = 0.0,
        soft_watchdog_timeout: float = 0.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.facts = facts or {}
        self._stopping = False
        self._scheduler, self._runner, self._channel = scheduler, runner, channel
        self._depth = depth
        self._timeouts, self._on_close = (watchdog_timeout, soft_watchdog_timeout), on_close
        self._busy_since: float | None = None  # None: resting
        self._queue: deque[tuple[StepPlan, InFlight, float | None]] = deque()
        self._recover = Recovery(scheduler.reset_device, runner, self._queue)
        watch = scheduler.cache.counters.timing.watch
        process = "per_stage_req_latency_seconds/request_process"
        self._accept = watch(process, lambda submit: scheduler.submit(submit))
        self._plan = watch("execution_plan_seconds", lambda: scheduler.plan())
        self._launch = watch("execution_launch_seconds", lambda plan: runner.launch(plan))
        self._read = watch("execution_read_seconds", lambda flight: flight.read())
        self._commit = watch("execution_commit_seconds", lambda *step: scheduler.commit(*step))
        self._masks = watch("output_mask_seconds", masks)
        self._finish = watch("output_sample_seconds", lambda *step: runner.finish(*step))
        self._inbox: deque[ToEngine] = deque()
        gauges = self._gauges = GaugeSender(scheduler, runner, channel)
        self._log = StepLog(scheduler, page_size, decode_log_interval)
        self._unchecked = True  # integrity, since the last step
        controls = Controls(channel, scheduler, self._drain, gauges.values, self.facts, self._stop)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: scheduler.abort,
            Control: controls.answer,
        }

    def run(self, on_hang: Callable[[], None]) -> None:
        """Tick until told to shut down, then close the runner; raises what a second failure raised.

        `on_hang` is called from the watchdog's thread, once the stacks are dumped.
        """
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
                message = self._inbox.popleft()
                self._handlers[type(message)](message)
            if not self._step() and not self._stopping:
                self._rest()
        except Exception as error:  # the loop's top
            self._send(self._recover(error))

    def _step(self) -> bool:
        """One turn of the queue; False when there was nothing to launch and nothing to read."""
        plan = self._plan()
        flight = None if plan is None else self._launch(plan)
        recorded = bool(self._queue) and (flight is None or len(self._queue) >= self._depth)
        if recorded:
            self._record()
        if plan is None or flight is None:
            return recorded
        self._finish(flight, self._masks(plan) if plan.constrained else None)
        self._queue.append((plan, flight, self._busy_since))
        if len(self._queue) > self._depth:  # depth 0
            self._record()
        return True

    def _record(self) -> None:
        plan, flight, begun = self._queue.popleft()
        self._unchecked = True
        self._send(self._commit(plan, self._read(flight)))
        self._gauges.step()
        if logger.isEnabledFor(logging.INFO):
            self._log.step(plan, begun or 0.0)

    def _rest(self) -> None:
        self._send(self._scheduler.drain())
        idle = self._scheduler.idle
        if idle:
            self._gauges.rest()
        if self._unchecked:
            self._unchecked = False
            self._send(check_integrity(self._scheduler))
        self._busy_since = None
        self._channel.wait(IDLE_WAIT if idle else STALL_WAIT)

    def _submit(self, message: Submit) -> None:
        try:
            self._accept(message)
        except Exception as error:  # one bad request must not end the others
            self._send([refused(message, error)])

    def _send(self, deltas: list[Delta]) -> None:
        if deltas:
            self._channel.send(Deltas(items=deltas))

    def _drain(self) -> None:
        while self._queue:
            self._record()

    def _stop(self) -> None:
        self._stopping = True
