"""The wire between API process and engine as both sides see it: who may send what.

Two processes are joined by ipc.py, two threads by local.py.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from jserve.types import FromEngine, ToEngine

_In = TypeVar("_In")
_Out = TypeVar("_Out", contravariant=True)


class Channel(Protocol[_In, _Out]):
    """One end. Sending never blocks (queues are unbounded: admission is the scheduler's) and is
    safe from any thread; an end has one receiving thread, and is closed after it."""

    def send(self, message: _Out) -> None: ...

    def drain(self) -> list[_In]:
        """Every message that has arrived, in order. Never blocks."""
        ...

    def wait(self, timeout: float, sentinel: int | None = None) -> None:
        """Until a message is there, the file descriptor `sentinel` is readable, or `timeout` s.

        What came is left for the next `drain`.
        """
        ...

    def close(self) -> None: ...


EngineEnd = Channel[ToEngine, FromEngine]
ApiEnd = Channel[FromEngine, ToEngine]
