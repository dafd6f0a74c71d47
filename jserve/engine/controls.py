"""Questions put to a running engine, by name, and the replies. Between two ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jserve.engine.channel import EngineEnd
from jserve.types import Control, ControlReply


class Controls:
    """`flush_cache` and `shutdown` are done; "server_info" is `facts` and the `numbers` of now."""

    def __init__(
        self,
        channel: EngineEnd,
        flush_cache: Callable[[], bool],
        numbers: Callable[[], dict[str, float]],
        facts: dict[str, Any],
        shutdown: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._operations: dict[str, Callable[[], bool | dict[str, Any] | None]] = {
            "flush_cache": flush_cache,
            "server_info": lambda: {**facts, **numbers()},
            "shutdown": shutdown,
        }

    def answer(self, message: Control) -> None:
        """Exactly one reply, also when the operation fails."""
        reply = ControlReply(id=message.id, ok=False, message=f"{message.op!r} failed")
        try:
            if message.op in self._operations:
                result = self._operations[message.op]()
                payload = result if isinstance(result, dict) else {}
                reply = ControlReply(id=message.id, ok=result is not False, payload=payload)
        finally:
            self._channel.send(reply)
