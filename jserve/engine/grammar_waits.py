"""Requests that wait for their grammars before they are sent: how many may, for how long, and what
ends a wait early. Knows nothing of how a grammar is compiled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jserve.config import SchedulerOptions
from jserve.engine.aborts import all_aborted
from jserve.engine.client import EngineClient
from jserve.engine.route import Route
from jserve.errors import QueueFullError, TimedOutError
from jserve.types import CompiledSpec

Compilation = concurrent.futures.Future[CompiledSpec]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """One request: its sequences, and what is done when all of them are aborted."""

    claims: Sequence[Route]
    aborted: asyncio.Future[None]


class GrammarWaits:
    """Usable from any event loop, and from any thread but for `compiled`.

    A wait counts for --max-queued-requests and --req-waiting-timeout, as one in the queue does that
    it may end in; of data-parallel ranks each has a queue, and their sum is what counts here.
    """

    def __init__(self, client: EngineClient, options: SchedulerOptions) -> None:
        self._client = client
        self._most, self._seconds = options.max_queued_requests, options.req_waiting_timeout
        # where priorities order the queue, a full one has room for who goes before its last
        self._ordered = options.enable_priority_scheduling
        self._open: dict[_Wait, None] = {}  # in order of arrival

    async def compiled(
        self,
        claims: Sequence[Route],
        begin: Callable[[], Compilation],
        leave: Callable[[Compilation], None],
    ) -> CompiledSpec | None:
        """What comes of the compilation that `begin` starts; None when all `claims` are aborted
        before. `leave` is told once the wait is over, however it ends.

        Raises QueueFullError, TimedOutError and what the compilation does.
        """
        with self._entered(claims) as wait, contextlib.ExitStack() as left:
            if all_aborted(claims):
                return None
            await self._check_room(wait)
            future = begin()
            left.callback(leave, future)
            compilation = asyncio.wrap_future(future)
            compilation.add_done_callback(lambda done: done.cancelled() or done.exception())
            ends = (compilation, wait.aborted)
            await asyncio.wait(ends, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if wait.aborted.done():
                return None
            if compilation.done():
                return compilation.result()
            why = f"waited for longer than {self._seconds:g} s (--req-waiting-timeout)"
            raise TimedOutError(f"The request {why}, for its grammar.")

    def wake(self) -> None:
        """Some ids were aborted: requests of which nothing is left end."""
        for wait in list(self._open):
            if all_aborted(wait.claims):
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    wait.aborted.get_loop().call_soon_threadsafe(_settle, wait.aborted)

    async def hold_up_flush(self) -> bool:
        """Whether the cache may not be flushed because somebody waits here: in a pause it may."""
        return bool(self._open) and not (await self._state()).get("paused")

    @contextlib.contextmanager
    def _entered(self, claims: Sequence[Route]) -> Iterator[_Wait]:
        wait = _Wait(claims, asyncio.get_running_loop().create_future())
        self._open[wait] = None
        try:
            yield wait
        finally:
            del self._open[wait]

    async def _check_room(self, wait: _Wait) -> None:
        if self._most is None:
            return
        most = self._most * max(int(self._client.gauges.values.get("num_dp_ranks", 1)), 1)
        queued = 0
        if not self._ordered:
            with contextlib.suppress(TimedOutError):  # one that is deaf keeps requests waiting
                queued = int((await self._state()).get("num_queue_reqs", 0))
        before = itertools.takewhile(lambda other: other is not wait, list(self._open))
        if queued + sum(len(one.claims) for one in (*before, wait)) > most:
            raise QueueFullError("The request queue is full.")

    async def _state(self) -> dict:
        """The engine's numbers of this moment."""
        return (await self._client.control("server_info")).payload


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
