"""Open questions to the engine, each answered once, on the event loop that asked, or not in time:
one that is deaf (stopped from outside, or in a step that takes long) holds up nobody who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jserve.engine.sendable import SENT, check_sendable
from jserve.errors import EngineDeadError, RequestError, TimedOutError
from jserve.types import Control, ControlReply


def check_question(op: Any, args: Mapping[str, Any]) -> None:
    """Raises RequestError naming what cannot be sent, or is of another type."""
    check_sendable("op", op)
    if type(op) is not str:
        raise RequestError(f"op must be a string, got {op!r}.", "op")
    for name, value in args.items():
        check_sendable("args", name)
        check_sendable(name, value, SENT)
        if type(value) not in (str, int, float, bool):
            raise RequestError(f"{name} must be a string or a number, got {value!r}.", name)


class Questions:
    """`ask` runs on event loops; `settle` and `fail` on the thread that reads the replies. None
    waits longer than `patience` seconds, if those are given."""

    def __init__(self, patience: float | None) -> None:
        self._patience = patience
        self._open: dict[str, asyncio.Future[ControlReply]] = {}

    async def ask(
        self, op: str, send: Callable[[Control], None], **args: str | int | float | bool
    ) -> ControlReply:
        """Raises what `send` raises, EngineDeadError, or TimedOutError; then the engine may still
        do what it was asked."""
        question = Control(id=uuid.uuid4().hex, op=op, args=args)
        future = asyncio.get_running_loop().create_future()
        self._open[question.id] = future
        try:
            send(question)
            return await asyncio.wait_for(future, self._patience)
        except TimeoutError:
            why = f"no answer of the engine within {self._patience:g} s"
            raise TimedOutError(f"{op}: {why}.") from None
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
