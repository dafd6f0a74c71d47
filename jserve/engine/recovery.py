"""What a failed step costs: the device starts over, once in an engine's lifetime."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from jserve.types import Delta

if TYPE_CHECKING:
    from jserve.runner.runner import Runner
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")


class Recovery:
    """Called with what a step has raised; → what has become of the requests that it was for. Raises
    the second error.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, queue: deque[Any]) -> None:
        self._scheduler, self._runner, self._queue = scheduler, runner, queue
        self._used = False

    def __call__(self, error: Exception) -> list[Delta]:
        """The donated KV and state are gone: start over with empty ones."""
        if self._used:
            raise error
        self._used = True
        logger.error("step failed; resetting the device and requeueing", exc_info=error)
        self._queue.clear()
        deltas = self._scheduler.reset_device()
        self._runner.reset()
        return deltas
