"""Log lines of committed steps: one for each step with prompts, and for every so many without; and
how the lines of an engine begin.
"""

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
    """Throughput counts the time of steps alone: of the one with the prompts, or of all since the
    last line of its kind. `interval`: decode steps between two lines. `rank`: whose lines they
    are, where the ranks of one process have some each."""

    def __init__(
        self, scheduler: Scheduler, page_size: int, interval: int, rank: int | None = None
    ) -> None:
        self._scheduler = scheduler
        self._extra = _of_rank(rank)
        self._page_size = page_size
        self._interval = interval
        self._num_decode_steps = 0
        self._last_read = 0.0
        self._generated, self._seconds = 0.0, 0.0  # tokens until the last line, steps since then

    def step(self, plan: StepPlan, begun: float) -> None:
        """Its tokens are read now; `begun`: when it was planned, by time.monotonic()."""
        now = time.monotonic()
        seconds = max(now - max(begun, self._last_read), 1e-6)  # until then another one ran
        self._last_read = now
        self._seconds += seconds
        if len(plan.slots) > plan.num_decode_rows:
            stats = self._scheduler.stats()
            new_tokens = plan.num_tokens - plan.num_decode_rows
            rate = new_tokens / seconds
            cached = sum(len(edit.pages) for edit in plan.edits) * self._page_size
            numbers = {"new_seqs": len(plan.edits), "new_tokens": new_tokens, "cached": cached}
            line = _PREFILL_LINE.format(throughput=rate, **stats, **numbers)
            logger.info(line, extra=self._extra)
            return
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval == 0:
            stats = self._scheduler.stats()
            rate = (stats["generation_tokens_total"] - self._generated) / self._seconds
            self._generated, self._seconds = stats["generation_tokens_total"], 0.0
            logger.info(_DECODE_LINE.format(throughput=rate, **stats), extra=self._extra)


def line_form(rank: int | None) -> logging.Formatter:
    """Of lines that begin with the time and, of several ranks, with whose they are: this one, or
    the one that a line brings."""
    form, times = "[%(asctime)s%(rank)s] %(message)s", "%Y-%m-%d %H:%M:%S"
    return logging.Formatter(form, times, defaults={"rank": ""} | _of_rank(rank))


def _of_rank(rank: int | None) -> dict[str, str]:
    return {} if rank is None else {"rank": f" DP{rank}"}
