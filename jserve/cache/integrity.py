"""Whether every page has exactly one owner and every lock a live reason. Reads all, changes
nothing; for tests and idle ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jserve.cache.pages import PageAllocator
from jserve.cache.radix import Node, RadixTree


def nodes(tree: RadixTree) -> Iterator[Node]:
    """Every node but the root."""
    stack = list(tree.root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def check_ownership(
    allocator: PageAllocator, tree: RadixTree, leases: Sequence[tuple[Node, np.ndarray]]
) -> None:
    """Raise AssertionError when a page or a lock is wrong.

    Args:
        leases: of each live lease the node that it locks and the pages that are its own.
    """
    cached = list(nodes(tree))
    private = [pages for _, pages in leases]
    owners = np.concatenate([allocator.free_pages(), *(node.pages for node in cached), *private])
    counts = np.bincount(owners, minlength=allocator.total + 1)
    bad = np.flatnonzero(counts[1:] != 1) + 1
    assert counts[0] == 0, "the trash page is owned"
    assert not len(bad), f"pages without exactly one owner: {bad[:16]} owners {counts[bad[:16]]}"
    wanted = Counter(step for node, _ in leases for step in node.path())
    wrong = [(node.lock_ref, wanted[node]) for node in cached if node.lock_ref != wanted[node]]
    assert not wrong, f"lock counts (held, live leases): {wrong[:16]}"
    protected = sum(len(node.pages) for node in cached if node.lock_ref)
    evictable = sum(len(node.pages) for node in cached if not node.lock_ref)
    held = (tree.protected_pages, tree.evictable_pages)
    assert held == (protected, evictable), f"{held=} {protected=} {evictable=}"
