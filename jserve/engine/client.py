"""The engine as the API process speaks to it: its messages brought to who waits.

Owns the thread that reads the engine's messages and the routes from request ids to event loops;
knows messages, not what they mean. Every wait ends: when the engine dies, each open route gets an
abort Delta with the error type EngineDeadError, each open question that error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from jserve.engine.life import EngineLife
from jserve.engine.questions import Questions
from jserve.engine.refusals import aborted, lost
from jserve.errors import EngineDeadError, RequestError
from jserve.types import Abort, ControlReply, Delta, Deltas, Gauges, Progress, Submit, ToEngine

Inbox = asyncio.Queue[Delta]
_Loop = asyncio.AbstractEventLoop


class EngineClient:
    """Speaks to one engine for the whole of its `life`. Methods are safe from any thread.

    `gauges` is the engine's latest message of that kind.
    """

    def __init__(self, life: EngineLife) -> None:
        self.gauges = Gauges(values={})
        self._routes: dict[str, tuple[_Loop, Inbox, int]] = {}
        self.route_of = self._routes.get
        self.left: dict[tuple[str, int], tuple[_Loop, Inbox, int]] = {}  # see farewell.py
        self._turns = itertools.count(1)  # a rid is used again while old Deltas are on the way
        self.aborted_early: dict[str, list[Abort]] = {}  # of those who wait to be sent
        self._questions = Questions()
        self._life = life
        self._channel = life.worker.channel
        self._handlers: dict[type, Callable[[Any], None]] = {
            Deltas: self._on_deltas,
            ControlReply: self._questions.settle,
            Progress: life.on_progress,
            Gauges: self._on_gauges,
        }
        self.reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self.reader.start()

    def require_alive(self) -> None:
        if self._life.ended:
            raise EngineDeadError(self._life.ended)

    def send(self, message: ToEngine) -> None:
        self._channel.send(message)

    @contextlib.contextmanager
    def open(self, submits: Sequence[Submit]) -> Iterator[Inbox]:
        """Submit, and get the Deltas of all `submits` in one inbox of the running event loop.

        What was not closed when the context ends is aborted. Raises RequestError for an id in use.
        """
        route = asyncio.get_running_loop(), Inbox(), next(self._turns)
        for submit in submits:
            claimed = submit.rid in self.aborted_early and not submit.claimed  # by another
            if claimed or submit.rid in self._routes:
                raise RequestError(f"rid {submit.rid} is in use by an open request.", "rid")
        over = [one.rid for one in submits if self.aborted_early.pop(one.rid, None)]
        self._routes.update((submit.rid, route) for submit in submits)
        try:
            for submit in submits:
                if submit.rid in over:  # the engine never hears of it
                    route[1].put_nowait(aborted(submit))
                else:
                    self._send_alive(msgspec.structs.replace(submit, turn=route[2]))
            yield route[1]
        finally:
            for submit in submits:
                self._abandon(submit.rid)

    def close(self, rid: str) -> bool:
        """Stop listening to `rid`; False when that had been done."""
        return self._routes.pop(rid, None) is not None

    async def control(self, op: str, **args: str | int | float | bool) -> ControlReply:
        return await self._questions.ask(op, self._send_alive, **args)

    def _send_alive(self, message: ToEngine) -> None:
        """For who waits already: a death from here on reaches it."""
        self.require_alive()
        self.send(message)

    def _abandon(self, rid: str) -> None:
        if self.close(rid):
            self.send(Abort(rid=rid))

    def _read(self) -> None:  # by the thread, and so are those below
        try:
            while self._life.worker.alive() and not self._life.failure:
                self._channel.wait(0.5, self._life.worker.sentinel)
                self._dispatch()
            self._channel.wait(0.05)
            self._dispatch()  # its last words
        finally:
            self._life.bury()
            keys = [*self.left, *((rid, route[2]) for rid, route in list(self._routes.items()))]
            self._on_deltas(Deltas(items=lost(keys, self._life.ended)))
            self._questions.fail(self._life.ended)

    def _dispatch(self) -> None:
        for message in self._channel.drain():
            self._handlers[type(message)](message)

    def _on_gauges(self, message: Gauges) -> None:
        self.gauges = message

    def _on_deltas(self, message: Deltas) -> None:
        by_loop: dict[_Loop, list[tuple[Inbox, Delta]]] = {}
        for delta in message.items:
            route = self._routes.get(delta.rid)
            if route is None or route[2] != delta.turn:
                route = self.left.get((delta.rid, delta.turn))
            if route is not None:
                by_loop.setdefault(route[0], []).append((route[1], delta))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop was closed under its requests
                for _, delta in items:
                    if self.left.pop((delta.rid, delta.turn), None) is None:
                        self._abandon(delta.rid)


def _deliver(items: list[tuple[Inbox, Delta]]) -> None:
    for inbox, delta in items:
        inbox.put_nowait(delta)
