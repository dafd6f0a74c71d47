"""Pausing: what happens to the requests that are there, by mode. Whether a pause is on is the
roster's `paused_at`; that nothing is planned then, and that requests that come wait, is the
scheduler's business.

    abort      all end with reason abort
    retract    who runs waits again, so that no KV is in use and the cache can be flushed
    in_place   who runs keeps its slot and its KV
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.cache.manager import CacheManager
from jserve.errors import RequestError
from jserve.scheduler.interruption import abort_requests, requeue
from jserve.scheduler.roster import Roster
from jserve.types import Abort


def _abort(roster: Roster, cache: CacheManager) -> None:
    abort_requests(roster, Abort(abort_all=True))


def _retract(roster: Roster, cache: CacheManager) -> None:
    for row in roster.residents:
        requeue(roster, cache, row)


def _keep(roster: Roster, cache: CacheManager) -> None:
    pass


MODES: dict[str, Callable[[Roster, CacheManager], None]] = {
    "abort": _abort,
    "retract": _retract,
    "in_place": _keep,
}


def begin_pause(roster: Roster, cache: CacheManager, mode: str) -> None:
    """Raises RequestError for an unknown mode. In a pause, a new mode is carried out as well."""
    if mode not in MODES:
        raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.", "mode")
    if roster.paused_at is None:
        roster.paused_at = roster.clock()
    MODES[mode](roster, cache)


def end_pause(roster: Roster) -> None:
    """The time of the pause counts for nobody's timeout."""
    if roster.paused_at is None:
        return
    now = roster.clock()
    for request in roster.requests.values():
        request.since += now - max(request.since, roster.paused_at)
    roster.paused_at = None
