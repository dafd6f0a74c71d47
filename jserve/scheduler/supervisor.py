"""What is done to a scheduler's requests from outside, between two steps: aborts, pauses, and to
start over when the device or the cache has failed. Decides nothing about who runs when.
"""

from __future__ import annotations

from jserve.cache.manager import CacheManager
from jserve.scheduler.interruption import abort_requests, requeue_residents
from jserve.scheduler.pause import begin_pause, end_pause
from jserve.scheduler.roster import Roster
from jserve.types import Abort, Delta


class Supervisor:
    """Its methods are Scheduler's."""

    def __init__(self, roster: Roster, cache: CacheManager) -> None:
        self._roster = roster
        self._cache = cache

    def abort(self, abort: Abort) -> None:
        """End the requests that it names; their pages and slots are free at once."""
        abort_requests(self._roster, abort)

    def flush_cache(self) -> bool:
        """Forget all prefixes; refused (False) while there is a request, in a pause one with KV."""
        paused = self._roster.paused_at is not None
        return (paused or not self._roster.requests) and self._cache.flush()

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
