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
from jserve.engine.claims import Claims, all_aborted, claim, forget
from jserve.engine.client import EngineClient
from jserve.errors import QueueFullError, TimedOutError
from jserve.types import CompiledSpec

Begin = Callable[[], concurrent.futures.Future[CompiledSpec]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """One request: the ids of its sequences, and what is done when all of them are aborted."""

    claims: Claims
    aborted: asyncio.Future[None]


class GrammarWaits:
    """Usable from any event loop, and from any thread but for `compiled`.

    A wait counts for --max-queued-requests and --req-waiting-timeout, as one in the queue does that
    it may end in.
    """

    def __init__(self, client: EngineClient, options: SchedulerOptions) -> None:
        self._client = client
        self._most, self._seconds = options.max_queued_requests, options.req_waiting_timeout
        # where priorities order the queue, a full one has room for who goes before its last
        self._ordered = options.enable_priority_scheduling
        self._open: dict[_Wait, None] = {}  # in order of arrival

    async def compiled(self, rids: Sequence[str], begin: Begin) -> CompiledSpec | None:
        """What comes of the compilation that `begin` starts; None when `rids` are aborted before.

        Raises QueueFullError, TimedOutError, RequestError (an id is in use) and what the
        compilation does. That goes on when the wait is over: others may wait for it too.
        """
        with self._entered(rids) as wait:
            await self._check_room(wait)
            compilation = asyncio.wrap_future(begin())
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
    def _entered(self, rids: Sequence[str]) -> Iterator[_Wait]:
        """While it is open, `rids` are claimed. They still are behind it, unless it fails: whoever
        gets its result owns them."""
        claims = claim(self._client, rids)
        wait = _Wait(claims, asyncio.get_running_loop().create_future())
        self._open[wait] = None
        try:
            yield wait
        except BaseException:  # cancelled, too
            forget(self._client, claims)
            raise
        finally:
            del self._open[wait]

    async def _check_room(self, wait: _Wait) -> None:
        if self._most is None:
            return
        queued = 0 if self._ordered else int((await self._state())["num_queue_reqs"])
        before = itertools.takewhile(lambda other: other is not wait, list(self._open))
        if queued + sum(len(one.claims) for one in (*before, wait)) > self._most:
            raise QueueFullError("The request queue is full.")

    async def _state(self) -> dict:
        """The engine's numbers of this moment."""
        return (await self._client.control("server_info")).payload


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
