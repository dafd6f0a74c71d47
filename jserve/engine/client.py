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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from jserve.engine.life import EngineLife
from jserve.engine.questions import Questions
from jserve.engine.refusals import aborted, lost
from jserve.engine.route import Route
from jserve.errors import EngineDeadError, RequestError
from jserve.types import Abort, ControlReply, Delta, Deltas, Gauges, Progress, Submit, ToEngine


class EngineClient:
    """Speaks to one engine for the whole of its `life`. Methods are safe from any thread."""

    def __init__(self, life: EngineLife) -> None:
        self.gauges = Gauges(values={})  # the latest
        self.routes: dict[str, Route] = {}
        self.left: dict[tuple[str, int], Route] = {}  # see farewell.py
        self._turns = itertools.count(1)
        self._questions = Questions(life.patience)
        self._life = life
        self._channel = life.worker.channel
        self.send: Callable[[ToEngine], None] = self._channel.send
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

    @contextlib.contextmanager
    def claim(self, rids: Iterable[str]) -> Iterator[list[Route]]:
        """Routes from `rids` to the running event loop. What was not closed when the context ends
        is, and what was sent of it is aborted. Raises RequestError for an id in use.
        """
        loop, turn, own = asyncio.get_running_loop(), next(self._turns), []
        try:
            for rid in rids:
                own.append(Route(rid, turn, loop))
                if self.routes.setdefault(rid, own[-1]) is not own[-1]:  # also by a thread
                    raise RequestError(f"rid {rid} is in use by an open request.", "rid")
            yield own
        finally:
            for route in own:
                self._abandon(route)

    def submit(self, submits: Iterable[Submit], take: Callable[[Delta], None]) -> None:
        """Send what is claimed; `take` gets its Deltas."""
        for submit in submits:
            route = self.routes[submit.rid]
            route.take = take
            if route.aborted:  # the engine never hears of it
                take(aborted(submit))
                continue
            self._send_alive(msgspec.structs.replace(submit, turn=route.turn))
            if route.aborted:  # meanwhile, by another thread
                self.send(Abort(rid=submit.rid))

    def close(self, rid: str) -> bool:
        """Stop listening to `rid`, which is free; whether it had been sent."""
        route = self.routes.pop(rid)
        sent, route.take = route.take is not None, None
        return sent

    async def control(self, op: str, **args: str | int | float | bool) -> ControlReply:
        return await self._questions.ask(op, self._send_alive, **args)

    def _send_alive(self, message: ToEngine) -> None:
        """For who waits already: a death from here on reaches it."""
        self.require_alive()
        self.send(message)

    def _abandon(self, route: Route) -> None:
        if self.routes.get(route.rid) is route and self.close(route.rid):
            self.send(Abort(rid=route.rid))

    def _read(self) -> None:  # by the thread, and so are those below
        try:
            while self._life.worker.alive() and not self._life.failure:
                self._channel.wait(0.5, self._life.worker.sentinel)
                self._dispatch()
            self._channel.wait(0.05)
            self._dispatch()  # its last words
        finally:
            self._life.bury()
            keys = [*self.left, *((rid, route.turn) for rid, route in list(self.routes.items()))]
            self._on_deltas(Deltas(items=lost(keys, self._life.ended)))
            self._questions.fail(self._life.ended)

    def _dispatch(self) -> None:
        for message in self._channel.drain():
            self._handlers[type(message)](message)

    def _on_gauges(self, message: Gauges) -> None:
        self.gauges = message

    def _on_deltas(self, message: Deltas) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Route, Delta]]] = {}
        for delta in message.items:
            route = self.routes.get(delta.rid)
            if route is None or route.turn != delta.turn:
                route = self.left.get((delta.rid, delta.turn))
            if route is not None:
                by_loop.setdefault(route.loop, []).append((route, delta))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop was closed under its requests
                for route, delta in items:
                    if self.left.pop((delta.rid, delta.turn), None) is None:
                        self._abandon(route)


def _deliver(items: list[tuple[Route, Delta]]) -> None:
    for route, delta in items:
        if route.take is not None:  # else it is behind a stop string
            route.take(delta)
