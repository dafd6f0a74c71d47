"""What a failed step costs: the device starts over, once in an engine's lifetime."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from jserve.runner.runner import Runner
    from jserve.runner.stacked import StackedRunner

logger = logging.getLogger("jserve.engine")

_T = TypeVar("_T")


class Recovery(Generic[_T]):
    """Called with what a step has raised; → what `requeue` says of the requests that it was for:
    those that ran wait again. Raises the second error.
    """

    def __init__(
        self, requeue: Callable[[], _T], runner: Runner | StackedRunner, queue: deque[Any]
    ) -> None:
        self._requeue, self._runner, self._queue = requeue, runner, queue
        self._used = False

    def __call__(self, error: Exception) -> _T:
        """The donated KV and state are gone: start over with empty ones."""
        if self._used:
            raise error
        self._used = True
        logger.error("step failed; resetting the device and requeueing", exc_info=error)
        self._queue.clear()
        told = self._requeue()
        self._runner.reset()
        return told
