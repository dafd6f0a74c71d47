"""What the cache must hold, by brute force: a dict from every cached prefix to its page, and a list
of leases. Knows prefixes as whole tuples of tokens, and no tree.

WatchedCache is the real CacheManager with this model beside it: every call is made on both and the
two must agree on the pages that were matched, on who was evicted, and on all that is left.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np

from jserve.cache.manager import CacheManager, Lease
from jserve.cache.radix import Namespace

Prefix = tuple[Namespace, tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class Entry:
    """One cached page."""

    page: int
    born: int
    priority: int  # the highest of who inserted or used it; a prompt that is over counts one more
    used: int = 0
    hits: int = 0  # requests that are over and used it


#: Which leaf goes first: the smallest.
ORDERS: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.used,),
    "lfu": lambda entry: (entry.hits, entry.used),
    "slru": lambda entry: (min(entry.hits, 2) // 2, entry.used),
    "priority": lambda entry: (entry.priority, entry.used),
    "fifo": lambda entry: (entry.born,),
}


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A lease: its pages in order, of which the first `len(shared)` are cached."""

    namespace: Namespace
    priority: int
    pages: list[int]
    shared: list[Prefix]
    sealed: bool = False


class CacheModel:
    """Every page is in `free`, in `cached` or a held lease's own."""

    def __init__(self, num_pages: int, page_size: int, order: str, radix: bool) -> None:
        self.page_size, self.radix = page_size, radix
        self.free = set(range(1, num_pages))
        self.cached: dict[Prefix, Entry] = {}
        self.children: Counter[Prefix] = Counter()  # cached pages right below each cached page
        self.locks: Counter[Prefix] = Counter()
        self.held: list[Held] = []
        self._order = ORDERS[order]
        self._time = 0

    def prefixes(self, namespace: Namespace, tokens: list[int]) -> list[Prefix]:
        """One of each whole page of `tokens`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def longest(self, namespace: Namespace, tokens: list[int]) -> list[Prefix]:
        """The cached prefixes of `tokens`, up to the first that is not."""
        run = self.prefixes(namespace, tokens)
        n = next((i for i, prefix in enumerate(run) if prefix not in self.cached), len(run))
        return run[:n]

    def open(self, tokens: list[int], namespace: Namespace, most: int, priority: int) -> Held:
        shared = self.longest(namespace, tokens[: max(most, 0)]) if self.radix else []
        self.touch(shared)
        self.locks.update(shared)
        pages = [self.cached[prefix].page for prefix in shared]
        held = Held(namespace, priority, pages, shared, sealed=not self.radix)
        self.held.append(held)
        return held

    def evictable(self) -> int:
        return len(self.cached) - len({prefix for held in self.held for prefix in held.shared})

    def evict(self, n: int) -> None:
        """One page at a time: the least of the leaves that no lease reads."""
        for _ in range(n):
            leaves = [p for p in self.cached if not self.children[p] and not self.locks[p]]
            self.drop(min(leaves, key=lambda prefix: self._order(self.cached[prefix])))

    def drop(self, prefix: Prefix) -> None:
        self.free.add(self.cached.pop(prefix).page)
        self.children[self.parent(prefix)] -= 1

    def parent(self, prefix: Prefix) -> Prefix:
        return prefix[0], prefix[1][: -self.page_size]

    def take(self, pages: list[int]) -> None:
        """The real allocator chose these: they must have been free."""
        assert self.free.issuperset(pages) and len(set(pages)) == len(pages), pages
        self.free.difference_update(pages)

    def add(self, held: Held, run: list[Prefix], born: int) -> None:
        """Cache the pages of `run` that are not; those that are stay as they are."""
        for i, prefix in enumerate(run):
            if prefix not in self.cached:
                self.cached[prefix] = Entry(held.pages[i], born, held.priority)
                self.children[self.parent(prefix)] += 1
        self.promote(run, held.priority)
        self.touch(run)

    def promote(self, run: list[Prefix], priority: int) -> None:
        for prefix in run:
            self.cached[prefix].priority = max(self.cached[prefix].priority, priority)

    def touch(self, run: list[Prefix]) -> None:
        now = self.now()
        for prefix in run:
            self.cached[prefix].used = now

    def now(self) -> int:
        self._time += 1
        return self._time

    def commit(self, held: Held, tokens: list[int]) -> str:
        """→ what became of it: "" | "sealed" | "extended" | "inserted"."""
        run, begin = self.prefixes(held.namespace, tokens), len(held.shared)
        if held.sealed or len(run) <= begin:
            return ""
        if run[begin] in self.cached:
            held.sealed = True
            return "sealed"
        last = held.shared[-1] if held.shared else None
        # chunk by chunk one run, of one age, until somebody else has forked, read or used it
        joins = last is not None and self.locks[last] == 1 and not self.children[last]
        if joins and last is not None:
            entry = self.cached[last]
            joins = not entry.hits and entry.priority == held.priority
        self.add(held, run, self.cached[last].born if joins and last else self.now())
        self.locks.update(run[begin:])
        held.shared = run
        return "extended" if joins else "inserted"

    def finish(self, held: Held, tokens: list[int], prompt_len: int) -> None:
        run = self.prefixes(held.namespace, tokens)[: len(held.pages)] if self.radix else []
        if len(run) > len(held.shared):
            self.add(held, run, self.now())
        else:
            run = held.shared
        self.promote(run, held.priority)
        self.promote(run[: prompt_len // self.page_size], held.priority + 1)
        for prefix in run:
            self.cached[prefix].hits += 1
        self.release(held)

    def release(self, held: Held) -> None:
        self.held.remove(held)
        self.locks.subtract(held.shared)
        cached = {entry.page for entry in self.cached.values()}
        self.free.update(page for page in held.pages if page not in cached)

    def check_partition(self, total: int) -> None:
        """Free, cached and private pages are disjoint and all there are."""
        private = [page for held in self.held for page in held.pages[len(held.shared) :]]
        cached = [entry.page for entry in self.cached.values()]
        owners = Counter([*self.free, *cached, *private])
        assert len(owners) == total and max(owners.values()) == 1, owners.most_common(4)


class WatchedCache(CacheManager):
    """CacheManager and CacheModel in lockstep. `events` counts what has happened."""

    def __init__(
        self, num_pages: int, page_size: int, events: Counter[str], *, eviction: str, radix: bool
    ) -> None:
        self.events = events
        self.on_finish = lambda lease, num_tokens: None  # for whoever knows the request
        self.watched: dict[Lease, Held] = {}
        self.make_model = lambda: CacheModel(num_pages, page_size, eviction, radix)
        super().__init__(num_pages, page_size, radix=radix, eviction=eviction)

    def reset(self) -> None:
        super().reset()
        self.model = self.make_model()
        self.watched.clear()

    def open(
        self, tokens: np.ndarray, namespace: Namespace, max_tokens: int, priority: int = 0
    ) -> Lease:
        held = self.model.open(tokens.tolist(), namespace, max_tokens, priority)
        lease = super().open(tokens, namespace, max_tokens, priority)
        assert lease.pages.tolist() == held.pages, f"{lease.pages} matched, not {held.pages}"
        self.watched[lease] = held
        self.events["hit"] += bool(held.pages)
        return lease

    def allocate(self, n: int) -> np.ndarray | None:
        model = self.model
        free, cached = len(model.free), len(model.cached)
        possible = n <= free + model.evictable()
        pages = super().allocate(n)
        assert (pages is not None) == possible, f"{n=} {possible=}"
        if pages is not None:
            model.take(pages.tolist())
            assert cached - len(model.cached) == max(0, n - free), "no more goes than is missing"
        self.agree()
        return pages

    def evict(self, n: int) -> None:
        count = min(n, self.model.evictable())
        self.model.evict(count)
        super().evict(n)
        self.events["evicted"] += count
        self.agree()

    def commit(self, lease: Lease, tokens: np.ndarray) -> None:
        held = self.held(lease)
        self.events[self.model.commit(held, tokens.tolist())] += 1
        super().commit(lease, tokens)
        assert lease.sealed == held.sealed and lease.num_shared == len(held.shared)
        self.agree()

    def finish(self, lease: Lease, tokens: np.ndarray, prompt_len: int = 0) -> None:
        self.on_finish(lease, len(tokens))
        self.model.finish(self.held(lease), tokens.tolist(), prompt_len)
        del self.watched[lease]
        super().finish(lease, tokens, prompt_len)

    def release(self, lease: Lease) -> None:
        if lease in self.watched:  # not the second half of `finish`
            self.model.release(self.held(lease))
            del self.watched[lease]
        super().release(lease)
        self.agree()

    def held(self, lease: Lease) -> Held:
        """The model's lease, with the pages by which the real one has grown."""
        held, pages = self.watched[lease], lease.pages.tolist()
        assert pages[: len(held.pages)] == held.pages, "page ids of a live lease only grow"
        held.pages = pages
        return held

    def refreshed(self) -> dict[Lease, Held]:
        """Every live lease, its pages up to date."""
        return {lease: self.held(lease) for lease in self.watched}

    def agree(self) -> None:
        """The pages are as many as in the model: cheap, after each call."""
        cached, evictable = len(self.model.cached), self.model.evictable()
        counts = (self.tree.evictable_pages, self.tree.protected_pages, self.allocator.num_free)
        expected = (evictable, cached - evictable, len(self.model.free))
        assert counts == expected, f"{counts=} {expected=}"

    def agree_in_full(self) -> None:
        """The real tree, read node by node, is the model's dict; every page has one owner."""
        self.refreshed()
        self.agree()
        wanted = {prefix: entry.page for prefix, entry in self.model.cached.items()}
        actual = self.actual()
        assert actual == wanted, f"{actual.keys() ^ wanted.keys()}"
        self.model.check_partition(self.total_pages)
        self.check_integrity()
        assert set(self.allocator.free_pages().tolist()) == self.model.free

    def actual(self) -> dict[Prefix, int]:
        held: dict[Prefix, int] = {}
        stack = [(child, (), edge[0]) for edge, child in self.tree.root.children.items()]
        while stack:
            node, before, namespace = stack.pop()
            tokens = before + tuple(node.key.tolist())
            for i, page in enumerate(node.pages.tolist()):
                end = len(before) + (i + 1) * self.page_size
                held[namespace, tokens[:end]] = page
            stack += [(child, tokens, namespace) for child in node.children.values()]
        return held
