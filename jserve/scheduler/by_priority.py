"""The scheduler's gauges; where priorities order the queue, who runs and who waits by priority too.
Chosen once, when the scheduler is built.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from jserve.cache.manager import CacheManager
from jserve.metrics.priority import make_mark
from jserve.scheduler.roster import Roster
from jserve.scheduler.statistics import measure

Measure = Callable[[], dict[str, float]]


def make_measure(cache: CacheManager, roster: Roster) -> Measure:
    """What cache and roster know now, by the names of series."""
    whole = functools.partial(measure, cache, roster)
    if not roster.settings.enable_priority_scheduling:
        return whole
    mark = make_mark(roster.settings.default_priority_value)
    seen: dict[str, float] = {}

    def parted() -> dict[str, float]:
        running = [row.request for row in roster.residents]
        groups = {"num_running_reqs": running, "num_queue_reqs": roster.waiting}
        counts = Counter(
            f"{name}{ending}"
            for name, requests in groups.items()
            for request in requests
            if (ending := mark(request.submit.priority))
        )
        seen.update(dict.fromkeys(counts, 0.0))  # those of priorities that have gone are zero
        return {**whole(), **seen, **counts}

    return parted
