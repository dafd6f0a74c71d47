"""The radix tree: which runs of tokens have valid KV, and in which pages. Owns nodes and their
locks; knows no request, and hands page ids out and in without asking whose they are.

A node's key is a run of whole pages of token ids. A child is found by the bytes of its first page;
below the root the namespace (extra key, cache salt) is part of that, so that namespaces never
share. All lengths are in pages unless the name says tokens. Token runs are compared as arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from jserve.cache.observer import NO_OBSERVER, Observer

Namespace = tuple[str | None, str | None]
LOWEST_PRIORITY = -(2**63)
_EMPTY = np.empty(0, np.int32)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Node:
    """One run of pages. `lock_ref` counts the live requests that read this node or one below it."""

    key: np.ndarray  # int32[pages · page_size]
    pages: np.ndarray  # int32[pages]
    parent: Node | None  # None: the root, or evicted
    edge: object  # this node's key in parent.children
    children: dict[object, Node] = dataclasses.field(default_factory=dict)
    lock_ref: int = 0
    last_access: int = 0
    created: int = 0
    hit_count: int = 0  # requests that are over and used this run, its first one included
    priority: int = LOWEST_PRIORITY  # the highest that inserted it; never above its parent's
    hidden: bool = False  # no match finds it, see spoilt.py
    offered: bool = False  # eviction knows it, or will find it in RadixTree.offers

    def path(self) -> Iterator[Node]:
        """From this node up to, without, the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """match, insert, lock, unlock. Its pages are `evictable_pages` + `protected_pages`."""

    def __init__(self, page_size: int, observer: Observer = NO_OBSERVER) -> None:
        self.page_size, self.observer = page_size, observer
        self.root = Node(_EMPTY, _EMPTY, None, None)
        self.evictable_pages = self.protected_pages = 0
        self.offers: list[Node] = []  # unlocked leaves that eviction has not taken note of yet
        self._clock = itertools.count(1)

    def find(self, start: Node, tokens: np.ndarray, space: Namespace) -> tuple[Node, int, int]:
        """Follow `tokens` down from `start`; changes nothing.

        → (deepest node entered, pages covered below `start`, pages covered of that node's own run)
        """
        node, covered, inside, end = start, 0, len(start.pages), self.page_size
        while end <= len(tokens) and inside == len(node.pages):
            child = node.children.get(self._edge(node, tokens[end - self.page_size : end], space))
            if child is None:
                break
            node, inside = child, 1  # its edge is its first page
            if len(node.pages) > 1:
                rest = tokens[end : end - self.page_size + len(node.key)]
                differs = np.flatnonzero(node.key[self.page_size :][: len(rest)] != rest)
                inside += int(differs[0] if len(differs) else len(rest)) // self.page_size
            covered += inside
            end += inside * self.page_size
        return node, covered, inside

    def match(self, tokens: np.ndarray, space: Namespace) -> tuple[Node, np.ndarray]:
        """Where the longest cached prefix of `tokens` ends, and its pages (a copy); splits a node
        in which it ends, marks the path as used. Valid until the next eviction, unless locked.
        """
        node, _, inside = self.find(self.root, tokens, space)
        node = self.split(node, inside)
        self._touch(node)
        return node, np.concatenate([_EMPTY, *(step.pages for step in node.path())][::-1])

    def insert(
        self, start: Node, tokens: np.ndarray, pages: np.ndarray, space: Namespace
    ) -> tuple[Node, int]:
        """Add the run `tokens` (whole pages) below `start`; the tree takes the pages it lacked.

        → (node at which the run now ends, how many leading `pages` it had: they stay the caller's)
        """
        node, covered, inside = self.find(start, tokens, space)
        node = self.split(node, inside)
        if covered < len(pages):
            rest, parent = tokens[covered * self.page_size :].copy(), node
            node = Node(rest, pages[covered:].copy(), parent, self._edge(parent, rest, space))
            node.created = next(self._clock)
            parent.children[node.edge] = node
            self.evictable_pages += len(node.pages)
            self.observer.stored(parent.pages[-1:], rest, node.pages, space)
        self._touch(node)
        self.offer(node)
        return node, covered

    def extend(self, node: Node, tokens: np.ndarray, pages: np.ndarray, space: Namespace) -> None:
        """Lengthen a leaf that only the caller has locked: a prompt's chunks become one node."""
        self.observer.stored(node.pages[-1:], tokens, pages, space)
        node.key = np.concatenate([node.key, tokens])
        node.pages = np.concatenate([node.pages, pages])
        self.protected_pages += len(pages)
        self._touch(node)

    def promote(self, node: Node, priority: int) -> None:
        """Give the path to `node` at least this priority."""
        for step in node.path():
            if step.priority >= priority:
                break
            step.priority = priority

    def lock(self, node: Node) -> None:
        """Protect the path from the root to `node` from eviction."""
        assert node is self.root or node.parent is not None, "lock of an evicted node"
        for step in node.path():
            if step.lock_ref == 0:
                self.evictable_pages -= len(step.pages)
                self.protected_pages += len(step.pages)
            step.lock_ref += 1

    def unlock(self, node: Node) -> None:
        """Take back one `lock`."""
        for step in node.path():
            assert step.lock_ref > 0, "unlock without lock"
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self.evictable_pages += len(step.pages)
                self.protected_pages -= len(step.pages)
                self.offer(step)

    def offer(self, node: Node) -> None:
        """Make `node` known to eviction, once, if it is an unlocked leaf."""
        if not (node.offered or node.children or node.lock_ref or node.parent is None):
            node.offered = True
            self.offers.append(node)

    def split(self, node: Node, pages: int) -> Node:
        """The node that ends after `pages` pages of `node`, which keeps its identity and locks."""
        if pages == len(node.pages):
            return node
        assert node.parent is not None and pages > 0, f"{pages=} {len(node.pages)=}"
        cut = pages * self.page_size
        key, run = node.key[:cut].copy(), node.pages[:pages].copy()
        upper = dataclasses.replace(node, key=key, pages=run, children={}, offered=False)
        node.parent.children[node.edge] = upper
        node.key, node.pages, node.parent = node.key[cut:].copy(), node.pages[pages:].copy(), upper
        node.edge = self._edge(upper, node.key, (None, None))
        upper.children[node.edge] = node
        return upper

    def _edge(self, parent: Node, tokens: np.ndarray, space: Namespace) -> object:
        first = tokens[: self.page_size].tobytes()
        return (space, first) if parent is self.root else first

    def _touch(self, node: Node) -> None:
        now = next(self._clock)
        for step in node.path():
            step.last_access = now
