"""Questions put to a running engine, by name, and the replies. Between two ticks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jserve.engine.channel import EngineEnd
from jserve.engine.integrity import check_integrity
from jserve.errors import RequestError
from jserve.types import Control, ControlReply, Deltas

if TYPE_CHECKING:
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")

_QUIET = ("flush_cache", "pause_generation")  # asked with nothing in flight


class Controls:
    """What the scheduler does by itself, and `shutdown`; "server_info" is `facts` and the `numbers`
    of now. `drain` takes in every launch in flight: rows of finished requests may be among them.
    """

    def __init__(
        self,
        channel: EngineEnd,
        scheduler: Scheduler,
        drain: Callable[[], None],
        numbers: Callable[[], dict[str, float]],
        facts: dict[str, Any],
        shutdown: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._drain = drain
        self._operations: dict[str, Callable[..., bool | dict[str, Any] | None]] = {
            "may_flush": scheduler.may_flush,
            "flush_cache": self._flush_cache,
            "pause_generation": self._pause,
            "continue_generation": scheduler.resume,
            "server_info": lambda: {**facts, **numbers(), "paused": scheduler.paused},
            "shutdown": shutdown,
        }

    def answer(self, message: Control) -> None:
        """Exactly one reply, also when the operation fails, which is then its own failure. Raises
        only what taking in the launches does: they are not this question's."""
        failed = ControlReply(id=message.id, ok=False, message=f"{message.op!r} failed")
        try:
            if message.op in _QUIET and not self._refused(message.op):
                self._drain()
        except BaseException:
            self._channel.send(failed)
            raise
        try:
            self._channel.send(self._reply(message))
        except Exception as error:  # a question's own, whatever it is: the next step goes on
            logger.error("%r failed", message.op, exc_info=error)
            why = f"{failed.message}: {type(error).__name__}: {error}"
            self._channel.send(ControlReply(id=message.id, ok=False, message=why))

    def _reply(self, message: Control) -> ControlReply:
        """What is refused is refused in words."""
        operation = self._operations.get(message.op)
        if operation is None:
            known = ", ".join(self._operations)
            why = f"there is no operation {message.op!r}, but {known}"
            return ControlReply(id=message.id, ok=False, message=why)
        try:
            inspect.signature(operation).bind(**message.args)
        except TypeError as error:
            return ControlReply(id=message.id, ok=False, message=f"{message.op}: {error}")
        try:
            result = operation(**message.args)
        except RequestError as error:
            return ControlReply(id=message.id, ok=False, message=str(error))
        payload = result if isinstance(result, dict) else {}
        return ControlReply(id=message.id, ok=result is not False, payload=payload)

    def _refused(self, op: str) -> bool:
        """A flush that is refused leaves the launches in flight: who waits for it asks often."""
        return op == "flush_cache" and self._scheduler.has_work and not self._scheduler.paused

    def _flush_cache(self) -> bool:
        if self._refused("flush_cache"):
            return False
        if deltas := check_integrity(self._scheduler):  # what is wrong would be forgotten unseen
            self._channel.send(Deltas(items=deltas))
        return self._scheduler.flush_cache()

    def _pause(self, mode: str = "abort") -> None:
        self._scheduler.pause(mode)
