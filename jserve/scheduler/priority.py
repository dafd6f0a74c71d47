"""From a request's priority to its rank; the smallest goes first. Also who gives way in a full
queue. On the device that is for preemption.py and interruption.py to say, which compare ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.errors import QueueFullError, RequestError
from jserve.scheduler.interruption import abort
from jserve.scheduler.request import Request, SchedulerSettings
from jserve.scheduler.roster import Roster

Rank = Callable[[int | None], int]

#: Behind every priority, which is an int64.
WORST_RANK = 1 << 64


def make_rank(settings: SchedulerSettings) -> Rank | None:
    """None: all are equal. Otherwise it may raise RequestError, for a priority without effect."""
    if settings.enable_priority_scheduling:
        return _by_priority(
            1 if settings.schedule_low_priority_values_first else -1,
            settings.default_priority_value,
        )
    return _refuse if settings.abort_on_priority_when_disabled else None


def displace(roster: Roster, request: Request) -> None:
    """The queue is full: drop the last of it for a request that goes before, or refuse that one.
    Those amid a run (jump.py) hold no place in it."""
    queued = [one for one in roster.waiting if not one.ran]
    if len(queued) < (roster.settings.max_queued or 0):
        return
    last = queued[-1] if queued else request
    if last.rank <= request.rank:
        raise QueueFullError("The request queue is full.")
    roster.totals["num_aborted_requests_total"] += 1
    abort(roster, last, QueueFullError("The request is aborted by a higher priority request."))


def _by_priority(sign: int, default: int | None) -> Rank:
    missing = WORST_RANK if default is None else sign * default
    return lambda priority: missing if priority is None else sign * priority


def _refuse(priority: int | None) -> int:
    if priority is not None:
        message = "priority is not used here: the server runs without --enable-priority-scheduling."
        raise RequestError(message, "priority")
    return 0
