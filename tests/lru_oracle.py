"""What an LRU cache of pages would hit, simply: no tree of runs, only pages that know their parent.

It sees the same order of accesses (who comes in, who needs a page, who ends) and has the same
capacity as the real cache, and draws its own conclusions. A page may be cached only while its
parent is; the least recently used page goes that has no cached child and no running user.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np


@dataclasses.dataclass(slots=True)
class Page:
    parent: Page | None
    key: int
    users: int = 0
    children: int = 0
    used: int = 0


@dataclasses.dataclass(slots=True)
class User:
    tokens: np.ndarray
    path: list[Page]  # cached pages that it reads
    private: int = 0  # pages of its own
    sealed: bool = False  # somebody else published the same: its own copy stays private


class LRUOracle:
    """`capacity` in pages."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self.free, self.page_size = capacity, page_size
        self.cached: dict[int, Page] = {}
        self.users: dict[int, User] = {}
        self.hit_tokens = self.asked_tokens = 0
        self.most_overdrawn = 0  # pages that the real cache had and this one would not
        self.seen_tokens = 0  # of the asked ones, what a cache without limit would have hit
        self._ever: set[int] = set()
        self._leaves: list[tuple[int, int, Page]] = []
        self._time = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens

    @property
    def unlimited_hit_rate(self) -> float:
        return self.seen_tokens / self.asked_tokens

    def admit(self, order: int, tokens: np.ndarray, first: bool) -> None:
        """It takes what is cached of its prefix. `first`: it has not been on the device before."""
        keys = self._keys(tokens, (len(tokens) - 1) // self.page_size)
        path: list[Page] = []
        for key in keys:
            page = self.cached.get(key)
            if page is None:
                break
            page.users += 1
            path.append(page)
        self._touch(path)
        self.users[order] = User(tokens, path)
        if first:
            seen = next((i for i, key in enumerate(keys) if key not in self._ever), len(keys))
            self.seen_tokens += seen * self.page_size
            self.hit_tokens += len(path) * self.page_size
            self.asked_tokens += len(tokens)

    def grow(self, order: int, num_tokens: int) -> None:
        """The request needs pages for so many tokens."""
        user = self.users[order]
        need = -(-num_tokens // self.page_size) - len(user.path) - user.private
        for _ in range(need):
            if self.free <= 0:
                self._evict()
            self.free -= 1
            user.private += 1

    def publish(self, order: int, num_tokens: int) -> None:
        """The first so many tokens of it have KV; whole pages may be read by others."""
        user = self.users[order]
        if not user.sealed:
            self._publish(user, user.tokens[:num_tokens], stop_at_duplicate=True)

    def finish(self, order: int, tokens: np.ndarray) -> None:
        self._publish(self.users[order], tokens, stop_at_duplicate=False)
        self.release(order)

    def release(self, order: int) -> None:
        user = self.users.pop(order)
        self.free += user.private
        for page in user.path:
            page.users -= 1
            self._offer(page)

    def _keys(self, tokens: np.ndarray, n: int, start: int = 0, key: int = 0) -> list[int]:
        """Of pages `start` … n: a page is its own tokens and all before it."""
        keys, raw, size = [], tokens.tobytes(), self.page_size * tokens.itemsize
        for i in range(start, n):
            key = hash((key, raw[i * size : (i + 1) * size]))
            keys.append(key)
        return keys

    def _publish(self, user: User, tokens: np.ndarray, stop_at_duplicate: bool) -> None:
        path, n = user.path, len(tokens) // self.page_size
        parent = path[-1] if path else None
        keys = self._keys(tokens, n, len(path), parent.key if parent else 0)
        if not keys:
            return
        if stop_at_duplicate and keys[0] in self.cached:
            user.sealed = True
            return
        for key in keys:
            page = self.cached.get(key)
            user.private -= 1
            if page is None:
                page = self.cached[key] = Page(parent, key)
                self._ever.add(key)
                if parent is not None:
                    parent.children += 1
            else:
                self.free += 1  # its copy
            page.users += 1
            path.append(page)
            parent = page
        self._touch(path)

    def _touch(self, path: list[Page]) -> None:
        self._time += 1
        for page in path:
            page.used = self._time

    def _offer(self, page: Page) -> None:
        if not page.users and not page.children:
            heapq.heappush(self._leaves, (page.used, page.key, page))

    def _evict(self) -> None:
        while self._leaves:
            used, key, page = heapq.heappop(self._leaves)
            stale = self.cached.get(key) is not page or page.users or page.children
            if stale or used != page.used:
                continue
            del self.cached[key]
            self.free += 1
            if page.parent is not None:
                page.parent.children -= 1
                self._offer(page.parent)
            return
        self.most_overdrawn = max(self.most_overdrawn, 1 - self.free)
