"""Whether every slot has exactly one owner, every row its tokens' pages, and the queue what is told
of it. Reads all, changes nothing; for tests and idle ticks.
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.cache.manager import CacheManager
from jserve.scheduler.roster import Roster


def make_check(roster: Roster, cache: CacheManager) -> Callable[[], None]:
    """What raises AssertionError when a page, a lock or a slot has no owner or two."""

    def check_integrity() -> None:
        cache.check_integrity()
        check_slots(roster)

    return check_integrity


def check_slots(roster: Roster) -> None:
    """Raise AssertionError when a slot has no owner or two, a row not its tokens' pages, or the
    queue is out of order or not what was counted."""
    residents, settings = roster.residents, roster.settings
    slots = sorted([*roster.free_slots, *(row.slot for row in residents)])
    assert slots == list(range(settings.num_slots)), f"{slots=}"
    counts = (len(roster.requests), len(roster.waiting), len(residents))
    assert counts[0] == counts[1] + counts[2], f"requests, waiting, with a slot: {counts}"
    assert all(request.row is None for request in roster.waiting), "a waiting request has a slot"
    places = [(request.rank, request.order) for request in roster.waiting]
    assert places == sorted(places), f"the queue is out of order: {places}"
    told = [roster.totals[name] for name in ("num_waiting_tokens", "num_retracted_reqs")]
    waiting = sum(len(request.prompt) + len(request.output_ids) for request in roster.waiting)
    retracted = sum(bool(request.num_retractions) for request in roster.waiting)
    assert told == [waiting, retracted], f"{told=} {waiting=} {retracted=}"
    for row in residents:
        needed = -(-int(roster.table.kv_len[row.slot]) // settings.page_size)
        assert row.alive and row.request.row is row, row.request.rid
        assert row.lease.num_pages == needed, f"{row.lease.num_pages=} {needed=}"
