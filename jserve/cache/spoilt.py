"""KV that turned out to be wrong, in the tree: no match finds it any more, and its pages go as soon
as nobody reads them. A request whose logits are NaN brings this about; others never come here.

A *hidden* node hangs below its parent by an edge that no tokens have, so that the same tokens can
be cached anew beside it; all that is below it is hidden too. Whoever observes the tree was told
that it is gone. Hidden nodes are locked, by leases that add nothing to them; the last of these
takes them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jserve.cache.integrity import subtree
from jserve.cache.radix import Node, RadixTree


class Lease(Protocol):
    """What is used of manager.Lease."""

    node: Node
    num_matched: int
    num_shared: int
    sealed: bool


def spoil(tree: RadixTree, leases: Iterable[Lease], lease: Lease) -> None:
    """Hide what `lease`, one of `leases`, has published; it is about to be released, and to leave
    nothing. What it had matched was there before it: others have answered from that.
    """
    top, num_pages = lease.node, lease.num_shared - lease.num_matched
    if num_pages == 0 or top.hidden:
        return
    while num_pages > len(top.pages):
        num_pages -= len(top.pages)
        assert top.parent is not None, f"{num_pages=} above the root"
        top = top.parent
    if num_pages < len(top.pages):  # it had matched the beginning
        tree.split(top, len(top.pages) - num_pages)
    assert top.parent is not None, f"{num_pages=} of the root"
    del top.parent.children[top.edge]
    top.edge = object()
    top.parent.children[top.edge] = top
    nodes = list(subtree(top))
    for node in nodes:
        node.hidden = True
    tree.observer.removed(np.concatenate([node.pages for node in nodes]))
    for one in leases:
        one.sealed |= one.node.hidden


def sweep(tree: RadixTree, node: Node) -> np.ndarray:
    """Take out hidden nodes around `node`, which is one, that nobody has locked; → their pages."""
    while node.parent is not None and node.parent.hidden:
        node = node.parent
    gone = [np.empty(0, np.int32)]
    for one in reversed(list(subtree(node))):  # leaves first
        if one.lock_ref == 0 and one.parent is not None:
            del one.parent.children[one.edge]
            tree.evictable_pages -= len(one.pages)
            tree.offer(one.parent)
            gone.append(one.pages)
            one.parent = None
    return np.concatenate(gone)
