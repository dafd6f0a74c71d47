"""What is looked at before a step is planned: chosen once, when the scheduler is built. A scheduler
without timeouts, priorities and sliding windows has none of it.
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.cache.manager import CacheManager
from jserve.scheduler.deadlines import Deadlines
from jserve.scheduler.preemption import Preemption
from jserve.scheduler.roster import Roster
from jserve.scheduler.sliding import Sliding


def make_upkeep(
    roster: Roster, cache: CacheManager, ratio: Callable[[], float]
) -> tuple[Callable[[], None], ...]:
    """The duties, in order. `ratio`: the new-token ratio of now."""
    settings, duties = roster.settings, []
    if cache.groups:
        duties.append(Sliding(roster, cache.groups).slide)
    if settings.req_waiting_timeout is not None or settings.req_running_timeout is not None:
        duties.append(Deadlines(roster).expire)
    if settings.enable_priority_scheduling and not settings.disable_priority_preemption:
        duties.append(Preemption(roster, cache, ratio).make_way)
    return tuple(duties)
