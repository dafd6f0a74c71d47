"""Questions put to a running engine, by name, and the replies. Between two ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jserve.engine.channel import EngineEnd
from jserve.engine.integrity import check_integrity
from jserve.errors import RequestError
from jserve.types import Control, ControlReply, Deltas

if TYPE_CHECKING:
    from jserve.scheduler.scheduler import Scheduler


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
        """Exactly one reply, also when the operation fails. What is refused is refused in words."""
        reply = ControlReply(id=message.id, ok=False, message=f"{message.op!r} failed")
        try:
            if message.op in self._operations:
                result = self._operations[message.op](**message.args)
                payload = result if isinstance(result, dict) else {}
                reply = ControlReply(id=message.id, ok=result is not False, payload=payload)
        except RequestError as error:
            reply = ControlReply(id=message.id, ok=False, message=str(error))
        finally:
            self._channel.send(reply)

    def _flush_cache(self) -> bool:
        if self._scheduler.has_work and not self._scheduler.paused:
            return False  # and the launches stay in flight: who waits for it asks many times
        self._drain()
        if deltas := check_integrity(self._scheduler):  # what is wrong would be forgotten unseen
            self._channel.send(Deltas(items=deltas))
        return self._scheduler.flush_cache()

    def _pause(self, mode: str = "abort") -> None:
        self._drain()
        self._scheduler.pause(mode)
