"""The scheduler's gauges and counters under the contract's metric names. Reads, changes nothing."""

from __future__ import annotations

from jserve.cache.manager import CacheManager
from jserve.scheduler.roster import Roster


def measure(cache: CacheManager, roster: Roster) -> dict[str, float]:
    """What cache and roster know: the moment's gauges, and totals since the start."""
    page, pages, tree = cache.page_size, cache.total_pages, cache.tree
    used = (pages - cache.full_pages) * page
    running, cut, kv_len = len(roster.residents), roster.chunked, roster.table.kv_len
    values = {
        "num_running_reqs": running,
        "num_queue_reqs": len(roster.waiting),
        "num_paused_reqs": 0 if roster.paused_at is None else len(roster.requests),
        "num_used_tokens": used,
        "token_usage": used / (pages * page),
        "utilization": max(used / (pages * page), running / roster.settings.num_slots),
        "full_token_usage": used / (pages * page),
        "max_total_num_tokens": pages * page,
        "kv_available_tokens": cache.allocator.num_free * page,
        "kv_evictable_tokens": tree.evictable_pages * page,
        "kv_protected_tokens": tree.protected_pages * page,
        "kv_used_tokens": used,
        "page_size": page,
        "context_len": roster.settings.context_length,
        "num_pages": pages,
        "evicted_tokens_total": cache.counters.evicted_pages * page,
        "allocator_failures_total": cache.counters.allocator_failures,
        "cache_active_references": len(cache.leases),
        "num_chunked_tokens": 0 if cut is None else len(cut.tokens) - int(kv_len[cut.slot]),
        **roster.totals,
    }
    for group in cache.groups:
        values |= group.gauges(values["token_usage"])
    return values
