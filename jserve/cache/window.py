"""The pages of layers that see only a window: a smaller pool beside the full one, whose pages come
and go while the full pages stay.

`of[page]` is the window page that lies beside a full page, 0 where there is none (a *tombstone*).
So whoever owns a full page owns what is beside it, and neither the tree nor a lease knows of it.
A live lease needs the window pages of its last tokens only, and locks them:

    [ not needed: private ones are freed, shared ones evictable | locked by this lease ]
      0 …                                                   first … num_pages

When window pages are short, those that nobody locks go, while their full pages stay cached: first
those that no prefix that ends with a node needs, then whole nodes in eviction order, a leaf with
all that it has. A prefix is of use only up to where the window before its end is whole.

A sealed lease has its prompt to itself, whose end comes again with the next request like it: what
it leaves behind is freed when window pages are short, before any other, and else published with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jserve.cache.eviction import Evictor
from jserve.cache.integrity import nodes
from jserve.cache.pages import PageAllocator
from jserve.cache.radix import Node, RadixTree

#: Tombstones come in runs of this part of the pool, because finding them reads the whole tree.
_BATCH = 1 / 16


class Lease(Protocol):
    """What a group reads of manager.Lease; it is a key, by identity."""

    num_shared: int
    num_pages: int
    sealed: bool

    @property
    def pages(self) -> np.ndarray: ...


class WindowGroup:
    """One group of windowed layers behind CacheManager, which alone calls it, but for `slide`.

    Args:
        window: a token sees this many, itself included.
        kept: tokens, at least `window`, that a live request keeps: more, so that what it leaves
            can be matched at the page before its end.
        full_pages: of the full pool, the trash page included, as `num_pages` is of this one.

    `tombstones` counts window pages that went without their full pages, `slid` those that private
    leases have left behind.
    """

    def __init__(
        self, window: int, kept: int, *, num_pages: int, full_pages: int, page_size: int
    ) -> None:
        assert kept >= window > 0, f"{kept=} {window=}"
        self.window, self.kept, self.page_size = window, kept, page_size
        self.num_pages, self._full_pages = num_pages, full_pages
        self.tombstones = self.slid = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything; the pool's contents are gone."""
        self.allocator = PageAllocator(self.num_pages)
        self.of = np.zeros(self._full_pages, np.int32)
        self.locks = np.zeros(self._full_pages, np.int32)  # leases that need what is beside a page
        self.evictable = 0  # full pages with a window page that nobody locks
        self._first: dict[Lease, int] = {}
        self._behind: dict[Lease, list[int]] = {}  # private pages of sealed ones, which lock none

    @property
    def available(self) -> int:
        """Window pages that `back` could give: free, or not locked."""
        return self.allocator.num_free + self.evictable

    def usable(self, pages: np.ndarray) -> int:
        """How many of a cached prefix's `pages` can be matched: up to where the whole window before
        the next token is there."""
        ends = np.arange(len(pages) + 1)
        first = self._needed(ends * self.page_size, self.window)
        holes = np.concatenate([[-1], np.where(self.of[pages] == 0, ends[:-1], -1)])
        whole = np.maximum.accumulate(holes) < first
        return int(np.flatnonzero(whole | (ends == 0))[-1])

    def enter(self, lease: Lease) -> None:
        """A lease begins: lock the window before the end of its prefix."""
        first = int(self._needed(lease.num_pages * self.page_size, self.window))
        self._first[lease] = first
        self._lock(lease.pages[first:])

    def leave(self, lease: Lease) -> None:
        """A lease ends, or is about to; what it leaves behind may be dropped."""
        self._behind.pop(lease, None)
        first = self._first.pop(lease, None)
        if first is not None:
            self._unlock(lease.pages[first:])

    def reclaimed(self, leases: Sequence[Lease]) -> list[int]:
        """Window pages more that `back` could give, were the first 0, 1, 2 … of `leases` over."""
        locks, gains = self.locks.copy(), [0]
        for lease in leases:
            pages = lease.pages[self._first[lease] :]
            locks[pages] -= 1
            gains.append(gains[-1] + int(np.count_nonzero(locks[pages] == 0)))
        return gains

    def back(self, pages: np.ndarray) -> None:
        """Lay a window page beside each of these new full pages, which the caller's lease locks.
        The caller has seen to it that there are enough.
        """
        self.of[pages] = self.allocator.allocate(len(pages))
        self.locks[pages] = 1

    def drop(self, pages: np.ndarray) -> int:
        """Free what is beside `pages`, which nobody locks; → how many that were."""
        pages = pages[self.of[pages] > 0]
        assert not self.locks[pages].any(), f"locked: {pages[self.locks[pages] > 0]}"
        self.allocator.free(self.of[pages])
        self.of[pages] = 0
        self.evictable -= len(pages)
        return len(pages)

    def mend(self, node: Node, begin: int, private: np.ndarray) -> None:
        """`private` pages hold the same tokens as the cached ones from page `begin` on of the path
        to `node`, and are about to be freed: what is beside them fills the tombstones of the path.
        """
        path = np.concatenate([private[:0], *(step.pages for step in node.path())][::-1])
        cached = path[begin : begin + len(private)]
        lost = (self.of[cached] == 0) & (self.of[private] > 0)
        self.of[cached[lost]] = self.of[private[lost]]
        self.of[private[lost]] = 0

    def slide(self, leases: Sequence[Lease], next_tokens: np.ndarray) -> np.ndarray:
        """The next token to be computed of each lease is at `next_tokens`: let go of what it and
        later ones do not see. Launches in flight that read it come first on the device.

        → int[·] the next tokens at which there will be more to let go.
        """
        first = self._needed(next_tokens, self.kept)
        kept: list[int] = []
        private: list[int] = []
        for lease, end in zip(leases, first.tolist(), strict=True):
            begin = self._first[lease]
            if begin < end:
                self._first[lease] = end
                middle = min(max(lease.num_shared, begin), end)
                kept += lease.pages[begin:middle].tolist()
                own = lease.pages[middle:end].tolist()
                if lease.sealed:
                    kept += own
                    self._behind.setdefault(lease, []).extend(own)
                else:
                    private += own
        if kept:
            self._unlock(np.array(kept, np.int32))
        if private:
            gone = np.array(private, np.int32)
            self._unlock(gone)
            self.slid += self.drop(gone)
        return (first + 1) * self.page_size + self.kept - 1

    def reclaim(self, n: int, tree: RadixTree, evictor: Evictor) -> np.ndarray:
        """Make `n` window pages free, with `available` ≥ n; → full pages of leaves that had to go,
        whose window pages are freed already."""
        gone = [np.empty(0, np.int32)]
        while n > self.allocator.num_free and self._behind:
            self._forget_behind(next(iter(self._behind)))
        missing = n - self.allocator.num_free
        if missing <= 0:
            return gone[0]
        batch = max(missing, int(self.num_pages * _BATCH))
        order = sorted(nodes(tree), key=lambda node: (evictor.key(node), not node.children))
        kept = -(-(self.window - 1) // self.page_size) + 1  # the last page of a prompt that comes
        for pages in _middles(order, kept):  # again is computed again: its window begins before it
            if batch <= 0:
                break
            batch -= self._bury(pages, batch)
        for node in order:
            if node.children or node.lock_ref:
                self._bury(node.pages, max(n - self.allocator.num_free, 0))
                continue
            while n > self.allocator.num_free and node.parent and self._loose(node.pages).any():
                gone.append(evictor.evict(len(node.pages)))  # this leaf, if no useless one is older
                self.drop(gone[-1])
        assert self.allocator.num_free >= n, f"{n=} {self.allocator.num_free=} {self.evictable=}"
        return np.concatenate(gone)

    def gauges(self, full_token_usage: float) -> dict[str, float]:
        """Under the contract's metric names; `token_usage` is the fuller pool's."""
        page, total = self.page_size, self.allocator.total
        usage = 1 - self.available / total
        return {
            "max_total_num_tokens_swa": total * page,
            "swa_available_tokens": self.allocator.num_free * page,
            "swa_evictable_tokens": self.evictable * page,
            "swa_used_tokens": (total - self.available) * page,
            "swa_token_usage": usage,
            "token_usage": max(usage, full_token_usage),
        }

    def check(self, free: np.ndarray, tree: RadixTree, leases: Iterable[Lease]) -> None:
        """Raise AssertionError unless each window page is free or beside one owned full page, and
        each lock has a reason. `free`: the full pages that are.
        """
        present = np.flatnonzero(self.of)
        owners = np.concatenate([self.allocator.free_pages(), self.of[present]])
        counts = np.bincount(owners, minlength=self.num_pages)
        bad = np.flatnonzero(counts[1:] != 1) + 1
        assert counts[0] == 0 and len(counts) == self.num_pages, "a page that does not exist"
        assert not len(bad), f"window pages without exactly one owner: {bad[:16]}"
        assert not self.of[free].any() and self.of[0] == 0, "a window page beside a free page"
        leases = set(leases)
        assert self._first.keys() == leases, "leases that the group knows, or does not"
        wanted: Counter[int] = Counter()
        for lease in leases:
            wanted.update(lease.pages[self._first[lease] :].tolist())
            left = lease.pages[lease.num_shared : self._first[lease]]
            left = np.setdiff1d(left, self._behind.get(lease, []))
            assert not self.of[left].any(), f"private pages outside the window: {left}"
        locks = np.zeros_like(self.locks)
        locks[list(wanted)] = list(wanted.values())
        wrong = np.flatnonzero(locks != self.locks)
        assert not len(wrong), f"locks of {wrong[:16]}: {self.locks[wrong[:16]]=} {locks[wrong]=}"
        assert self.of[list(wanted)].all(), "a locked tombstone"
        cached = np.concatenate([free[:0], *(node.pages for node in nodes(tree))])
        behind = np.array([page for own in self._behind.values() for page in own], np.int32)
        evictable = int(np.count_nonzero(self._loose(np.concatenate([cached, behind]))))
        assert evictable == self.evictable, f"{evictable=} {self.evictable=}"

    def _needed(self, next_token: Any, window: int) -> Any:
        """The first page that a token at this position sees, or an array of them."""
        return np.maximum(next_token + 1 - window, 0) // self.page_size

    def _forget_behind(self, lease: Lease) -> None:
        self.slid += self.drop(np.array(self._behind.pop(lease), np.int32))

    def _bury(self, pages: np.ndarray, most: int) -> int:
        """Drop up to `most` window pages of cached full pages; the last ones stay longest."""
        buried = self.drop(pages[self._loose(pages)][:most])
        self.tombstones += buried
        return buried

    def _loose(self, pages: np.ndarray) -> np.ndarray:
        """bool[len(pages)]: there is a window page, and nobody locks it."""
        return (self.of[pages] > 0) & (self.locks[pages] == 0)

    def _lock(self, pages: np.ndarray) -> None:
        self.evictable -= int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += 1

    def _unlock(self, pages: np.ndarray) -> None:
        """Of one lease or of several, so a page may be there more than once."""
        np.subtract.at(self.locks, pages, 1)
        self.evictable += len(set(pages[self.locks[pages] == 0].tolist()))


def _middles(order: Sequence[Node], kept: int) -> Iterator[np.ndarray]:
    """Of each node, in order, all pages but the last `kept` ones."""
    for node in order:
        if len(node.pages) > kept:
            yield node.pages[: len(node.pages) - kept]
