"""Log lines of committed steps: one for each step with prompts, and for every so many without."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from jserve.plan import StepPlan

if TYPE_CHECKING:
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")

_PREFILL_LINE = (
    "Prefill batch, #new-seq: {new_seqs}, #new-token: {new_tokens}, #cached-token: {cached}, "
    "token usage: {token_usage:.2f}, #running-req: {num_running_reqs:.0f}, "
    "#queue-req: {num_queue_reqs:.0f}, input throughput (token/s): {throughput:.2f}"
)
_DECODE_LINE = (
    "Decode batch, #running-req: {num_running_reqs:.0f}, #token: {num_used_tokens:.0f}, "
    "token usage: {token_usage:.2f}, cuda graph: False, "
    "gen throughput (token/s): {throughput:.2f}, #queue-req: {num_queue_reqs:.0f}"
)


class StepLog:
    """Throughput is what the scheduler's totals grew by between two lines. `interval`: decode steps
    between two lines."""

    def __init__(self, scheduler: Scheduler, page_size: int, interval: int) -> None:
        self._scheduler = scheduler
        self._page_size = page_size
        self._interval = interval
        self._num_decode_steps = 0
        self._generated, self._prefilled = _Rate(), _Rate()

    def step(self, plan: StepPlan) -> None:
        if len(plan.slots) > plan.num_decode_rows:
            stats = self._scheduler.stats()
            rate = self._prefilled.take(stats["prefill_tokens_total"])
            new_tokens = plan.num_tokens - plan.num_decode_rows
            cached = sum(len(edit.pages) for edit in plan.edits) * self._page_size
            numbers = {"new_seqs": len(plan.edits), "new_tokens": new_tokens, "cached": cached}
            logger.info(_PREFILL_LINE.format(throughput=rate, **stats, **numbers))
            return
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval == 0:
            stats = self._scheduler.stats()
            rate = self._generated.take(stats["generation_tokens_total"])
            logger.info(_DECODE_LINE.format(throughput=rate, **stats))

    def rest(self) -> None:
        """No work: throughput counts from here on."""
        stats = self._scheduler.stats()
        self._prefilled.take(stats["prefill_tokens_total"])
        self._generated.take(stats["generation_tokens_total"])


class _Rate:
    """What a total grew by, a second, since the last `take`."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, time.monotonic()

    def take(self, total: float) -> float:
        now = time.monotonic()
        rate = (total - self._total) / max(now - self._since, 1e-6)
        self._total, self._since = total, now
        return rate
