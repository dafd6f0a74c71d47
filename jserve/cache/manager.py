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

import numpy as np

from jserve.cache.eviction import Evictor
from jserve.cache.integrity import check_ownership
from jserve.cache.pages import PageAllocator
from jserve.cache.radix import Namespace, Node, RadixTree


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """Pages of one live request. Made by CacheManager.open; ended by finish or release."""

    namespace: Namespace
    node: Node  # where the shared part ends; the root when there is none
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
    """Page ownership over one pool. With `radix` off the interface is the same, without reuse."""

    def __init__(
        self, num_pages: int, page_size: int, *, radix: bool = True, eviction: str = "lru"
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.total_pages = num_pages - 1  # without the trash page
        self.radix, self._eviction = radix, eviction
        self.evicted_pages = self.allocator_failures = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, earlier leases too: the pool's contents are gone."""
        self.tree = RadixTree(self.page_size)
        self.allocator = PageAllocator(self.num_pages)
        self._evictor = Evictor(self.tree, self._eviction)
        self._leases: set[Lease] = set()

    @property
    def available_pages(self) -> int:
        """What allocate could give now: free, or cached and not in use."""
        return self.allocator.num_free + self.tree.evictable_pages

    def open(self, tokens: np.ndarray, namespace: Namespace, max_tokens: int) -> Lease:
        """Match a prefix of at most `max_tokens` tokens, lock it, and start with its pages."""
        limit = min(len(tokens), max_tokens) // self.page_size * self.page_size if self.radix else 0
        node, pages = self.tree.match(tokens[:limit], namespace)
        self.tree.lock(node)
        lease = Lease(namespace, node, len(pages), not self.radix, pages, len(pages))
        self._leases.add(lease)
        return lease

    def allocate(self, n: int) -> np.ndarray | None:
        """int32[n] page ids for a lease to extend by, evicting as needed; None: not enough."""
        if n > self.available_pages:
            self.allocator_failures += 1
            return None
        missing = n - self.allocator.num_free
        if missing > 0:
            evicted = self._evictor.evict(missing)
            self.evicted_pages += len(evicted)
            self.allocator.free(evicted)
        return self.allocator.allocate(n)

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
        if node is not self.tree.root and node.lock_ref == 1 and not node.children:
            self.tree.extend(node, run, pages)
        else:
            lease.node, _ = self.tree.insert(node, run, pages, lease.namespace)
            self.tree.lock(lease.node)
            self.tree.unlock(node)
        lease.num_shared = end

    def finish(self, lease: Lease, tokens: np.ndarray) -> None:
        """End a lease; the whole pages of `tokens` (all that have valid KV) stay cached."""
        end = min(len(tokens) // self.page_size, lease.num_pages) if self.radix else 0
        begin = lease.num_shared
        if end > begin:
            run = tokens[begin * self.page_size : end * self.page_size]
            _, present = self.tree.insert(lease.node, run, lease.pages[begin:end], lease.namespace)
            self.allocator.free(lease.pages[begin : begin + present])
            lease.num_shared = end
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """End a lease: what the tree has stays there, unlocked; everything private is freed."""
        self._leases.remove(lease)
        self.tree.unlock(lease.node)
        self.allocator.free(lease.pages[lease.num_shared :])

    def flush(self) -> bool:
        """Drop the tree; refused (False) while a request is live."""
        if self._leases:
            return False
        self.allocator.free(self._evictor.evict(self.tree.evictable_pages))
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page has one owner and every lock a live reason."""
        leases = [(lease.node, lease.pages[lease.num_shared :]) for lease in self._leases]
        check_ownership(self.allocator, self.tree, leases)
