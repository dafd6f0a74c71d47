"""Who owns which page. The one door to the KV cache for the scheduler: match, lock, allocate,
commit, finish, release.

Every page is free, cached (the tree's) or private (one lease's). A Lease is one stay of one request
on the device, its pages in order:

    [ shared: the tree's, locked by this lease | private: this lease's own | to come ]
      0 … num_shared                            … num_pages

Page ids of a lease only grow and are never rewritten, because launches in flight read them. A run
that the tree learnt from somebody else meanwhile is a duplicate: then the lease is *sealed*, i.e.
keeps the rest private until it ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jserve.cache.counters import CacheCounters
from jserve.cache.eviction import Evictor, eviction_policy
from jserve.cache.integrity import check_cache
from jserve.cache.observer import NO_OBSERVER, Observer
from jserve.cache.paired import make_allocator
from jserve.cache.radix import Namespace, Node, RadixTree
from jserve.cache.spoilt import spoil, sweep
from jserve.cache.window import WindowGroup
from jserve.metrics.timing import UNTIMED, Timing


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """Pages of one live request. Made by CacheManager.open; ended by finish or release."""

    namespace: Namespace
    priority: int
    node: Node  # where the shared part ends; the root when there is none
    num_matched: int  # pages that the tree had for it
    num_shared: int
    sealed: bool
    _table: np.ndarray
    num_pages: int

    @property
    def pages(self) -> np.ndarray:
        """int32[num_pages], valid until the next `extend`."""
        return self._table[: self.num_pages]

    def extend(self, pages: np.ndarray) -> None:
        """Append newly allocated pages."""
        end = self.num_pages + len(pages)
        if end > len(self._table):
            table = np.empty(max(end, 2 * len(self._table)), np.int32)
            table[: self.num_pages] = self.pages
            self._table = table
        self._table[self.num_pages : end] = pages
        self.num_pages = end


class CacheManager:
    """Page ownership over one pool. With `radix` off the interface is the same, without reuse.

    `groups` are the pools beside it, of layers that keep less; most models have none.
    `eviction` and `protected_threshold`: see eviction.py. `counters` and `leases` may be read.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        radix: bool = True,
        eviction: str = "lru",
        protected_threshold: int = 2,
        observer: Observer = NO_OBSERVER,
        groups: Sequence[WindowGroup] = (),
        timing: Timing = UNTIMED,
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.total_pages = num_pages - 1  # without the trash page
        self.radix, self._observer, self.groups = radix, observer, groups
        self._policy = eviction_policy(eviction, protected_threshold)
        self.counters = CacheCounters(timing=timing)
        self.reset()

    def reset(self) -> None:
        """Forget everything, earlier leases too: the pool's contents are gone."""
        self.allocator = make_allocator(self.num_pages, self.groups)
        self.leases: set[Lease] = set()  # of live requests
        self.tree = RadixTree(self.page_size, self._observer)
        self._evictor = Evictor(self.tree, self._policy, self.counters)
        self._observer.cleared()

    @property
    def full_pages(self) -> int:
        """Free, or cached and not in use, whatever the groups have."""
        return self.allocator.num_free + self.tree.evictable_pages

    @property
    def available_pages(self) -> int:
        """What allocate could give now."""
        return min([self.full_pages, *(group.available for group in self.groups)])

    def open(
        self, tokens: np.ndarray, namespace: Namespace, max_tokens: int, priority: int = 0
    ) -> Lease:
        """Match a prefix of at most `max_tokens` tokens, lock it, and start with its pages."""
        started, counters = time.perf_counter(), self.counters
        limit = min(len(tokens), max_tokens) // self.page_size * self.page_size if self.radix else 0
        node, pages = self.tree.match(tokens[:limit], namespace)
        for group in self.groups:
            usable = group.usable(pages)
            if usable < len(pages):
                node, pages = self.tree.match(tokens[: usable * self.page_size], namespace)
        self.tree.lock(node)
        size, sealed = len(pages), not self.radix
        lease = Lease(namespace, priority, node, size, size, sealed, pages, size)
        self.leases.add(lease)
        for group in self.groups:
            group.enter(lease)
        matched = size * self.page_size
        counters.matched_tokens += matched
        counters.match_lengths[matched.bit_length()] += 1
        counters.timing.observe("cache_match_seconds", time.perf_counter() - started)
        return lease

    def allocate(self, n: int) -> np.ndarray | None:
        """int32[n] page ids for a lease to extend by, evicting as needed; None: not enough."""
        if n > self.available_pages:
            self.counters.allocator_failures += 1
            return None
        started = time.perf_counter()
        missing = n - self.allocator.num_free
        if missing > 0:
            self.evict(missing)
        for group in self.groups:
            self.allocator.free(group.reclaim(n, self.tree, self._evictor))
        pages = self.allocator.allocate(n)
        self.counters.timing.observe("cache_allocate_seconds", time.perf_counter() - started)
        return pages

    def evict(self, n: int) -> None:
        """Free up to `n` cached pages that no lease holds."""
        self.allocator.free(self._evictor.evict(n))

    def commit(self, lease: Lease, tokens: np.ndarray) -> None:
        """Publish the whole pages of `tokens`: the lease's, KV written or dispatched to be."""
        begin, end = lease.num_shared, len(tokens) // self.page_size
        if lease.sealed or end <= begin:
            return
        run, pages = tokens[begin * self.page_size : end * self.page_size], lease.pages[begin:end]
        node = lease.node
        if self.tree.find(node, run, lease.namespace)[1]:
            lease.sealed = True
            return
        alone = node.lock_ref == 1 and not node.children and not node.hit_count  # the root never
        if alone and node.priority == lease.priority:
            self.tree.extend(node, run, pages, lease.namespace)
        else:
            lease.node, _ = self.tree.insert(node, run, pages, lease.namespace)
            self.tree.promote(lease.node, lease.priority)
            self.tree.lock(lease.node)
            self.tree.unlock(node)
        lease.num_shared = end

    def finish(self, lease: Lease, tokens: np.ndarray, prompt_len: int = 0) -> None:
        """End a lease; the whole pages of `tokens` (all that have valid KV) stay cached, and were
        hit once. `prompt_len`: the first that many tokens are worth more to the priority policy.
        """
        node, begin, keep = lease.node, lease.num_shared, self.radix and not lease.node.hidden
        end = min(len(tokens) // self.page_size, lease.num_pages) if keep else 0
        for group in self.groups:
            group.leave(lease)
        if end > begin:
            run, pages = tokens[begin * self.page_size : end * self.page_size], lease.pages
            node, present = self.tree.insert(node, run, pages[begin:end], lease.namespace)
            for group in self.groups:
                group.mend(node, begin, pages[begin : begin + present])
            self.allocator.free(pages[begin : begin + present])
            lease.num_shared = end
        self.tree.promote(node, lease.priority)
        for step in node.path():
            step.hit_count += 1
        output_pages = lease.num_shared - prompt_len // self.page_size
        self._policy.promote_prompt(self.tree, node, output_pages, lease.priority + 1)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """End a lease: what the tree has stays there, unlocked; everything private is freed."""
        self.leases.remove(lease)
        for group in self.groups:
            group.leave(lease)
        self.tree.unlock(lease.node)
        self.allocator.free(lease.pages[lease.num_shared :])
        if lease.node.hidden:
            self.allocator.free(sweep(self.tree, lease.node))

    def discard(self, lease: Lease) -> None:
        """End a lease whose KV is wrong: no match finds what it had published."""
        spoil(self.tree, self.leases, lease)
        self.release(lease)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page has one owner and every lock a live reason."""
        check_cache(self.allocator, self.tree, self._evictor, self.leases, self.groups)
