"""The scheduler's gauges and counters under the contract's metric names. Reads, changes nothing."""

from __future__ import annotations

from jserve.cache.manager import CacheManager
from jserve.scheduler.roster import Roster


def measure(cache: CacheManager, roster: Roster) -> dict[str, float]:
    """What cache and roster know: the moment's gauges, and totals since the start."""
    page, pages, tree = cache.page_size, cache.total_pages, cache.tree
    used = (pages - cache.available_pages) * page
    return {
        "num_running_reqs": len(roster.residents),
        "num_queue_reqs": len(roster.waiting),
        "num_retracted_reqs": sum(bool(request.num_retractions) for request in roster.waiting),
        "num_used_tokens": used,
        "token_usage": used / (pages * page),
        "max_total_num_tokens": pages * page,
        "kv_available_tokens": cache.allocator.num_free * page,
        "kv_evictable_tokens": tree.evictable_pages * page,
        "kv_protected_tokens": tree.protected_pages * page,
        "kv_used_tokens": used,
        "page_size": page,
        "num_pages": pages,
        "evicted_tokens_total": cache.evicted_pages * page,
        "allocator_failures_total": cache.allocator_failures,
        **roster.totals,
    }
