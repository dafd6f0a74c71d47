"""Which cached pages go first when the pool is full. Owns the order; the tree owns nodes and locks.

The tree offers its unlocked leaves as they appear. They enter the heap when pages are wanted, and a
key that has grown since is corrected when it comes up.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from jserve.cache.radix import Node, RadixTree

#: Eviction order, smallest first. A key may only grow while its node lives.
EVICTION_KEYS: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "slru": lambda node: (int(node.hit_count >= 2), node.last_access),
    "fifo": lambda node: (node.created,),
}


class Evictor:
    """Takes pages out of one tree. `order`: a name of EVICTION_KEYS."""

    def __init__(self, tree: RadixTree, order: str = "lru") -> None:
        self._tree = tree
        self._key = EVICTION_KEYS[order]
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._tickets = itertools.count()  # equal keys leave in the order of their offers

    def evict(self, n: int) -> np.ndarray:
        """Drop up to `n` pages of unlocked leaves, tails first; → their ids, now the caller's."""
        freed = [np.empty(0, np.int32)]
        tree = self._tree
        self._take_offers()
        while n > 0 and self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.offered = False
            if node.parent is None or node.children or node.lock_ref:
                continue  # offered again when it becomes an unlocked leaf
            if self._key(node) == key:
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
        return np.concatenate(freed)

    def _take_offers(self) -> None:
        for node in self._tree.offers:
            heapq.heappush(self._heap, (self._key(node), next(self._tickets), node))
        self._tree.offers.clear()
