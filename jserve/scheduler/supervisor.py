"""What is done to a scheduler's requests from outside, between two steps: aborts, pauses, and to
start over when the device or the cache has failed. Decides nothing about who runs when.
"""

from __future__ import annotations

from collections.abc import Sequence

from jserve.cache.manager import CacheManager
from jserve.scheduler.interruption import abort_requests, requeue_residents
from jserve.scheduler.jump import Accept, append_forced
from jserve.scheduler.pause import begin_pause, end_pause
from jserve.scheduler.request import Request
from jserve.scheduler.roster import Roster
from jserve.types import Abort, Delta, FinishReason


class Supervisor:
    """Its methods are Scheduler's."""

    def __init__(self, roster: Roster, cache: CacheManager, accept: Accept) -> None:
        self._roster, self._cache = roster, cache
        self._accept = accept

    def abort(self, abort: Abort) -> None:
        """End the requests that it names; their pages and slots are free at once."""
        abort_requests(self._roster, abort)

    def finish(self, request: Request, finish: FinishReason) -> None:
        """End one for a reason that was found outside. It is not over."""
        self._roster.totals["num_aborted_requests_total"] += finish.type == "abort"
        self._roster.end(request, finish)

    def jump(self, request: Request, tokens: Sequence[int]) -> None:
        """Give one that runs tokens which nobody has drawn."""
        append_forced(self._roster, self._cache, self._accept, request, tokens)

    def count(self, name: str, times: int) -> None:
        """Add to one of the totals."""
        totals = self._roster.totals
        totals[name] = totals.get(name, 0) + times

    def may_flush(self) -> bool:
        """Whether nobody needs what is cached: there is no request, in a pause none with KV."""
        paused = self._roster.paused_at is not None
        return (paused or not self._roster.requests) and not self._cache.leases

    def flush_cache(self) -> bool:
        """Forget all prefixes; refused (False) unless it may."""
        if not self.may_flush():
            return False
        self._cache.reset()
        return True

    def pause(self, mode: str = "abort") -> None:
        """Plan nothing until `resume`; nothing is in flight. RequestError: no mode of pause.py."""
        begin_pause(self._roster, self._cache, mode)

    def resume(self) -> None:
        """End a pause; without one, nothing happens."""
        end_pause(self._roster)

    def reset_device(self) -> list[Delta]:
        """After a failed launch KV and slots are gone: who was running waits again, once."""
        self._cache.reset()
        self._roster.num_in_flight = 0
        requeue_residents(self._roster)
        return self._roster.drain()

    def rebuild(self) -> list[Delta]:
        """After check_integrity has failed: forget all pages, locks and slots, and count it."""
        self._roster.totals["integrity_failures_total"] += 1
        return self.reset_device()
