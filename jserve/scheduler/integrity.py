"""Whether every slot has exactly one owner and every row its tokens' pages. Reads all, changes
nothing; for tests and idle ticks.
"""

from __future__ import annotations

from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.roster import Roster


def check_slots(roster: Roster, settings: SchedulerSettings) -> None:
    """Raise AssertionError when a slot has no owner or two, or a row not its tokens' pages."""
    residents = roster.residents
    slots = sorted([*roster.free_slots, *(row.slot for row in residents)])
    assert slots == list(range(settings.num_slots)), f"{slots=}"
    counts = (len(roster.requests), len(roster.waiting), len(residents))
    assert counts[0] == counts[1] + counts[2], f"requests, waiting, with a slot: {counts}"
    assert all(request.row is None for request in roster.waiting), "a waiting request has a slot"
    places = [(request.rank, request.order) for request in roster.waiting]
    assert places == sorted(places), f"the queue is out of order: {places}"
    for row in residents:
        needed = -(-int(roster.table.kv_len[row.slot]) // settings.page_size)
        assert row.alive and row.request.row is row, row.request.rid
        assert row.lease.num_pages == needed, f"{row.lease.num_pages=} {needed=}"
