"""The scheduler's gauges; where priorities order the queue, who runs and who waits by priority too.
Chosen once, when the scheduler is built.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence

from jserve.cache.manager import CacheManager
from jserve.metrics.priority import Mark, make_mark
from jserve.scheduler.request import Request
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
        running = Counter(mark(row.request.submit.priority) for row in roster.residents)
        groups = {"num_running_reqs": running, "num_queue_reqs": _queued(roster.waiting, mark)}
        counts = {
            f"{name}{ending}": count
            for name, counter in groups.items()
            for ending, count in counter.items()
            if ending
        }
        seen.update(dict.fromkeys(counts, 0.0))  # those of priorities that have gone are zero
        return {**whole(), **seen, **counts}

    return parted


def _queued(waiting: Sequence[Request], mark: Mark) -> Counter[str]:
    """How many wait, by mark. Equal ranks are equal priorities and stand together; the queue may be
    long."""
    counts: Counter[str] = Counter()
    begin = 0
    while begin < len(waiting):
        first = waiting[begin]
        end = bisect.bisect_right(waiting, first.rank, begin, key=operator.attrgetter("rank"))
        counts[mark(first.submit.priority)] += end - begin
        begin = end
    return counts
