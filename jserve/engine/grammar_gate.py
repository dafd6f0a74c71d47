"""The engine's end of the wire, as the loop sees it: a request with a grammar comes through once
that is loaded, and no other waits for it.
"""

from __future__ import annotations

from jserve.engine.channel import EngineEnd
from jserve.engine.grammar_queue import GrammarQueue
from jserve.types import Submit, ToEngine

_POLL = 0.002  # seconds between two looks at what is loading


class GrammarGate:
    """An EngineEnd that stands before `channel`."""

    def __init__(self, channel: EngineEnd, queue: GrammarQueue) -> None:
        self.send, self.close = channel.send, channel.close
        self._channel, self._queue = channel, queue

    def drain(self) -> list[ToEngine]:
        messages, queue = self._channel.drain(), self._queue
        if queue.waiting or any(isinstance(m, Submit) and m.grammar for m in messages):
            return queue.sift(messages, self._channel)
        return messages

    def wait(self, timeout: float, sentinel: int | None = None) -> None:
        self._channel.wait(min(timeout, _POLL) if self._queue.waiting else timeout, sentinel)
