"""Whether every page has exactly one owner, every lock a live reason, and eviction every leaf that
may go. Reads all, changes nothing; for tests and idle ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jserve.cache.eviction import Evictor
from jserve.cache.paired import Allocator
from jserve.cache.radix import Node, RadixTree


class Lease(Protocol):
    """What is read of manager.Lease."""

    node: Node
    num_shared: int
    num_pages: int

    @property
    def pages(self) -> np.ndarray: ...


class Group(Protocol):
    """What is used of window.WindowGroup."""

    def check(self, free: np.ndarray, tree: RadixTree, leases: Any) -> None: ...


def nodes(tree: RadixTree) -> Iterator[Node]:
    """Every node but the root."""
    for node in tree.root.children.values():
        yield from subtree(node)


def subtree(node: Node) -> Iterator[Node]:
    """`node` and all below it, parents first."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.children:
            stack.extend(node.children.values())
        yield node


def check_cache(
    allocator: Allocator,
    tree: RadixTree,
    evictor: Evictor,
    leases: Collection[Lease],
    groups: Sequence[Group],
) -> None:
    """Raise AssertionError for what any of those below finds."""
    read = [(lease.node, lease.pages, lease.num_shared) for lease in leases]
    check_ownership(allocator, tree, read)
    check_order(tree, evictor.heap, evictor.key)
    for group in groups:
        group.check(allocator.free_pages(), tree, leases)


def check_ownership(
    allocator: Allocator,
    tree: RadixTree,
    leases: Sequence[tuple[Node, np.ndarray, int]],
) -> None:
    """Raise AssertionError when a page or a lock is wrong.

    Args:
        leases: of each live lease the node that it locks, its pages, and how many of them it shares
            with the tree: the first ones.
    """
    cached = list(nodes(tree))
    private = [pages[num_shared:] for _, pages, num_shared in leases]
    owners = np.concatenate([allocator.free_pages(), *(node.pages for node in cached), *private])
    counts = np.bincount(owners, minlength=allocator.total + 1)
    bad = np.flatnonzero(counts[1:] != 1) + 1
    assert counts[0] == 0, "the trash page is owned"
    assert not len(bad), f"pages without exactly one owner: {bad[:16]} owners {counts[bad[:16]]}"
    wanted = Counter(step for node, *_ in leases for step in node.path())
    wrong = [(node.lock_ref, wanted[node]) for node in cached if node.lock_ref != wanted[node]]
    assert not wrong, f"lock counts (held, live leases): {wrong[:16]}"
    protected = sum(len(node.pages) for node in cached if node.lock_ref)
    evictable = sum(len(node.pages) for node in cached if not node.lock_ref)
    held = (tree.protected_pages, tree.evictable_pages)
    assert held == (protected, evictable), f"{held=} {protected=} {evictable=}"
    for node, pages, num_shared in leases:
        there = np.concatenate([pages[:0], *(step.pages for step in node.path())][::-1])
        same = np.array_equal(pages[:num_shared], there)
        assert same, f"a lease shares {pages[:num_shared]}, its node has {there}"
    assert all(node.lock_ref for node in cached if node.hidden), "a hidden node that nobody locks"
    told, hidden = tree.observer.num_pages(), sum(len(node.pages) for node in cached if node.hidden)
    assert told in (None, protected + evictable - hidden), f"{told=} {held=} {hidden=}"


def check_order(
    tree: RadixTree,
    heap: Sequence[tuple[tuple[int, ...], int, Node]],
    key: Callable[[Node], tuple[int, ...]],
) -> None:
    """Raise AssertionError when eviction cannot find a leaf, or would take it too late.

    Args:
        heap: what eviction knows beside the tree's offers: key at that time, any number, node.
        key: of a node now.
    """
    shrunk = [(known, key(node)) for known, _, node in heap if known > key(node)]
    assert not shrunk, f"eviction keys shrank (known, now): {shrunk[:16]}"
    known = {node for _, _, node in heap}.union(tree.offers)
    assert len(known) == len(heap) + len(tree.offers), "eviction has been offered a node twice"
    cached = list(nodes(tree))
    lost = [node for node in cached if not (node.children or node.lock_ref or node in known)]
    assert not lost, f"{len(lost)} leaves of {[len(node.pages) for node in lost[:16]]} pages lost"
    inverted = [
        (step.parent.priority, step.priority)
        for step in cached
        if step.parent is not None
        and step.parent is not tree.root
        and step.parent.priority < step.priority
    ]
    assert not inverted, f"priorities above their parents' (parent, own): {inverted[:16]}"
