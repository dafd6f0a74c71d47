"""Open questions to the engine, each answered once, on the event loop that asked."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from jserve.errors import EngineDeadError
from jserve.types import Control, ControlReply


class Questions:
    """`ask` runs on event loops; `settle` and `fail` on the thread that reads the replies."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[ControlReply]] = {}

    async def ask(
        self, op: str, send: Callable[[Control], None], **args: str | int | float | bool
    ) -> ControlReply:
        """Raises what `send` raises, or EngineDeadError."""
        question = Control(id=uuid.uuid4().hex, op=op, args=args)
        future = asyncio.get_running_loop().create_future()
        self._open[question.id] = future
        try:
            send(question)
            return await future
        finally:
            del self._open[question.id]

    def settle(self, reply: ControlReply) -> None:
        future = self._open.get(reply.id)
        if future is not None:
            _call(future, lambda: future.set_result(reply))

    def fail(self, why: str) -> None:
        for future in list(self._open.values()):
            _call(future, lambda future=future: future.set_exception(EngineDeadError(why)))


def _call(future: asyncio.Future[ControlReply], settle: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed under its question
        future.get_loop().call_soon_threadsafe(lambda: None if future.done() else settle())
