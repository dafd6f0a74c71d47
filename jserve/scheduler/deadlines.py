"""Ends requests that have waited, or run, for longer than they may. Knows no page and no plan."""

from __future__ import annotations

import math

from jserve.errors import TimedOutError
from jserve.scheduler.interruption import abort
from jserve.scheduler.request import Request
from jserve.scheduler.roster import Roster

#: Looks at the requests in the time of one limit: how late a request may end, at most.
_LOOKS = 20
_MAX_INTERVAL = 0.5  # seconds


class Deadlines:
    """Both limits are of one stay, in the queue or in a slot: a request that is retracted begins a
    new one, and one that jumps goes on with its own. Pauses do not count (pause.py)."""

    def __init__(self, roster: Roster) -> None:
        waiting, running = roster.settings.req_waiting_timeout, roster.settings.req_running_timeout
        self._roster = roster
        self._waiting = math.inf if waiting is None else waiting
        self._running = math.inf if running is None else running
        self._interval = min(self._waiting / _LOOKS, self._running / _LOOKS, _MAX_INTERVAL)
        self._next = -math.inf

    def expire(self) -> None:
        """End whoever is over a limit; pages and slots are free at once."""
        roster, now = self._roster, self._roster.clock()
        if now < self._next:
            return
        self._next = now + self._interval
        waited = [one for one in roster.waiting if now - one.since + _before(one) > self._waiting]
        ran = [row.request for row in roster.residents]
        ran = [one for one in ran if now - one.since + one.ran > self._running]
        why = f"waited for longer than {self._waiting:g} s (--req-waiting-timeout)."
        self._end(waited, "num_waiting_timeouts_total", why)
        why = f"ran for longer than {self._running:g} s (--req-running-timeout)."
        self._end(ran, "num_running_timeouts_total", why)

    def _end(self, requests: list[Request], total: str, why: str) -> None:
        self._roster.totals[total] += len(requests)
        for request in requests:
            abort(self._roster, request, TimedOutError(f"The request {why}"))


def _before(request: Request) -> float:
    """Seconds that it had waited for its grammar when it came: part of its first stay."""
    return request.submit.waited if request.seed is None else 0.0
