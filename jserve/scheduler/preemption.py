"""Makes way for a request of high priority: whom to take off the device so that it can start.

Looks once a step at the first of the queue, after admission has refused it for want of pages or of
a slot. Victims are the running requests whose rank is worse by more than the threshold, the worst
first and of equals the newest, and no more of them than it takes; none, if all would not do. They
wait again as after a retraction. Knows no budget of a step, and starts nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jserve.cache.manager import CacheManager, Lease
from jserve.cache.radix import Node
from jserve.scheduler.admission import has_room, prompt_budget
from jserve.scheduler.interruption import requeue
from jserve.scheduler.policy import POLICIES
from jserve.scheduler.request import Request, Row
from jserve.scheduler.roster import Roster
from jserve.scheduler.sliding import WindowBudget


class Preemption:
    """`ratio`: the new-token ratio of now."""

    def __init__(self, roster: Roster, cache: CacheManager, ratio: Callable[[], float]) -> None:
        self._roster = roster
        self._cache = cache
        self._ratio = ratio
        self._threshold = roster.settings.priority_scheduling_preemption_threshold
        self._order_by = POLICIES[roster.settings.policy]
        self._unused = np.random.default_rng(0)  # no policy that goes with priorities is random
        self._in_vain: tuple[Request | Row, ...] = ()  # the candidate and the rows that stayed

    def make_way(self) -> None:
        """Requeue whom the first of the queue needs gone, if they are enough."""
        roster, (rows, slots) = self._roster, self._roster.live_rows()
        refused = roster.full or not roster.free_slots or self._cache.groups  # those do not tell
        if not roster.waiting or not refused:
            return
        if len(rows) < len(roster.running):
            return  # what is in flight will end some of them
        worst = roster.waiting[0].rank + self._threshold
        victims = [row for row in roster.residents if row.request.rank > worst]
        if not victims or self._in_vain == (roster.waiting[0], *roster.residents):
            return
        victims.sort(key=lambda row: (-row.request.rank, -row.request.order))
        count = self._count(self._first(), victims, slots)
        if count is None:
            self._in_vain = (roster.waiting[0], *roster.residents)
        elif roster.chunked is None or roster.chunked in victims[:count]:
            for row in victims[:count]:
                requeue(roster, self._cache, row)
            roster.totals["num_preempted_requests_total"] += count
            roster.full = False

    def _first(self) -> Request:
        order_by, queue = self._order_by, self._roster.waiting
        return (order_by(queue, self._cache, self._unused) if order_by else queue)[0]

    def _count(self, request: Request, victims: Sequence[Row], running: np.ndarray) -> int | None:
        """How many victims, from the first, let `request` start; None: all do not."""
        tokens, cache = request.tokens(), self._cache
        lease = cache.open(tokens, request.namespace, request.max_match)
        extend = len(tokens) - lease.num_pages * cache.page_size
        leases = [row.lease for row in victims]
        gains = [_reclaimed(leases), *(group.reclaimed(leases) for group in cache.groups)]
        least = 0 if self._roster.free_slots else 1
        for count in range(least, len(victims) + 1):
            gone = [row.slot for row in victims[:count]]
            left, gained = running[~np.isin(running, gone)], [gain[count] for gain in gains]
            alone = len(self._roster.residents) == count
            if self._has_room(request, extend, left, gained, alone):
                break
        else:
            count = None
        cache.release(lease)
        return count

    def _has_room(
        self,
        request: Request,
        extend: int,
        left: np.ndarray,
        gained: Sequence[int],
        alone: bool,
    ) -> bool:
        """Admission's question, with the slots in `left` and `gained` pages of each pool more."""
        roster, cache, page = self._roster, self._cache, self._cache.page_size
        table, settings, ratio = roster.table, roster.settings, self._ratio()
        # pages that decode rows of the same step take first
        starting = int(np.count_nonzero(table.kv_len[left] % page == 0)) * settings.mixed
        free = (cache.full_pages + gained[0] - starting) * page
        reserved = None if alone else float(table.expected(left, ratio).sum())
        if not has_room(request, extend, free, reserved, page):
            return False
        behind = len(roster.requests)  # at most
        chunk = min(extend, prompt_budget(settings, len(left) * settings.mixed, behind))
        windows = [WindowBudget.of(group, table, left, ratio) for group in cache.groups]
        for window, pages in zip(windows, gained[1:], strict=True):
            window.gained = pages - starting
        return all(window.has_room(request, extend, chunk, alone) for window in windows)


def _reclaimed(leases: Sequence[Lease]) -> list[int]:
    """Pages that could be allocated more, were the first 0, 1, 2 … of `leases` released."""
    gains, unlocked = [0], Counter[Node]()
    for lease in leases:
        gain = lease.num_pages - lease.num_shared
        for node in lease.node.path():
            unlocked[node] += 1
            if unlocked[node] == node.lock_ref:
                gain += len(node.pages)
        gains.append(gains[-1] + gain)
    return gains
