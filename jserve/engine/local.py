"""Both ends of a Channel in one process: two queues that hand the objects over as they are."""

from __future__ import annotations

import collections
import contextlib
import queue
from typing import Any, Generic, TypeVar

from jserve.engine.channel import ApiEnd, EngineEnd

_In = TypeVar("_In")
_Out = TypeVar("_Out", contravariant=True)


def local_ends() -> tuple[ApiEnd, EngineEnd]:
    to_engine: queue.SimpleQueue[Any] = queue.SimpleQueue()
    to_api: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return _LocalEnd(to_api, to_engine), _LocalEnd(to_engine, to_api)


class _LocalEnd(Generic[_In, _Out]):
    def __init__(self, inbox: queue.SimpleQueue[Any], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._waiting: collections.deque[Any] = collections.deque()

    def send(self, message: _Out) -> None:
        self._outbox.put(message)

    def drain(self) -> list[_In]:
        messages = list(self._waiting)
        self._waiting.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def wait(self, timeout: float, sentinel: int | None = None) -> None:
        if not self._waiting:
            with contextlib.suppress(queue.Empty):
                self._waiting.append(self._inbox.get(timeout=timeout))

    def close(self) -> None:
        pass
