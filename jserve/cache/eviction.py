"""Which cached pages go first when the pool is full. Owns the order; the tree owns nodes and locks.

The tree offers its unlocked leaves as they appear. They enter the heap when pages are wanted, and a
key that has grown since is corrected when it comes up. So a key may only grow while its node lives.

    lru       last use
    lfu       finished requests that used it, then last use
    slru      whether at least `protected_threshold` finished requests used it, then last use
    priority  highest priority of a request that used it, then last use; a finished request's
              prompt counts one more than its output
    fifo      creation
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable

import numpy as np

from jserve.cache.counters import CacheCounters
from jserve.cache.radix import Node, RadixTree

EVICTION_POLICIES = ("lru", "lfu", "slru", "priority", "fifo")


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """`key`: the smallest goes first. `promote_prompt(tree, node, output_pages, priority)`: the
    path to `node` has been of use, but the last `output_pages` of it are no prompt.
    """

    key: Callable[[Node], tuple[int, ...]]
    promote_prompt: Callable[[RadixTree, Node, int, int], None] = lambda *_: None


def eviction_policy(name: str, protected_threshold: int = 2) -> EvictionPolicy:
    """`name`: one of EVICTION_POLICIES; `protected_threshold` is slru's."""
    policies = {
        "lru": EvictionPolicy(lambda node: (node.last_access,)),
        "lfu": EvictionPolicy(lambda node: (node.hit_count, node.last_access)),
        "slru": EvictionPolicy(
            lambda node: (int(node.hit_count >= protected_threshold), node.last_access)
        ),
        "priority": EvictionPolicy(lambda node: (node.priority, node.last_access), _promote_prompt),
        "fifo": EvictionPolicy(lambda node: (node.created,)),
    }
    return policies[name]


def _promote_prompt(tree: RadixTree, node: Node, output_pages: int, priority: int) -> None:
    output_pages = max(output_pages, 0)
    while node.parent is not None and output_pages >= len(node.pages):
        output_pages -= len(node.pages)
        node = node.parent
    if node.parent is not None:
        tree.promote(tree.split(node, len(node.pages) - output_pages), priority)


class Evictor:
    """Takes pages out of one tree, and counts them."""

    def __init__(
        self,
        tree: RadixTree,
        policy: EvictionPolicy | None = None,
        counters: CacheCounters | None = None,
    ) -> None:
        self._tree = tree
        self.key = (policy or eviction_policy("lru")).key
        self.heap: list[tuple[tuple[int, ...], int, Node]] = []  # key, ticket, node
        self._counters = counters or CacheCounters()
        self._tickets = itertools.count()  # equal keys leave in the order of their offers

    def evict(self, n: int) -> np.ndarray:
        """Drop up to `n` pages of unlocked leaves, tails first; → their ids, now the caller's."""
        started = time.perf_counter()
        runs = self._take_runs(n)
        pages = np.concatenate([np.empty(0, np.int32), *runs])
        if runs:
            self._tree.observer.removed(pages)
        counters = self._counters
        counters.evicted_pages += len(pages)
        counters.timing.observe("eviction_duration_seconds", time.perf_counter() - started)
        return pages

    def _take_runs(self, n: int) -> list[np.ndarray]:
        freed, tree = [], self._tree
        self._take_offers()
        while n > 0 and self.heap:
            key, _, node = heapq.heappop(self.heap)
            node.offered = False
            if node.parent is None or node.children or node.lock_ref:
                continue  # offered again when it becomes an unlocked leaf
            if self.key(node) == key:
                taken = min(n, len(node.pages))
                freed.append(node.pages[len(node.pages) - taken :])
                tree.evictable_pages -= taken
                n -= taken
                if taken == len(node.pages):
                    del node.parent.children[node.edge]
                    tree.offer(node.parent)
                    node.parent = None
                else:
                    node.pages = node.pages[:-taken]
                    node.key = node.key[: -taken * tree.page_size]
            tree.offer(node)  # still a leaf: its key has grown, or its tail is gone
            self._take_offers()
        return freed

    def _take_offers(self) -> None:
        for node in self._tree.offers:
            heapq.heappush(self.heap, (self.key(node), next(self._tickets), node))
        self._tree.offers.clear()
