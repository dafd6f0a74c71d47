"""Which page ids are free. Owns the free list; knows no request, no token and no device memory.

Ids run from 1 to num_pages − 1; page 0 is the trash page, which padding writes to and nobody owns.
"""

from __future__ import annotations

import numpy as np


class PageAllocator:
    """A stack of free page ids: O(n) in numpy, AssertionError on misuse."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"a pool needs the trash page and one more: {num_pages=}"
        self.total = num_pages - 1  # pages that can be owned: all but the trash page
        self.num_free = self.total
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)  # lowest ids leave first
        self._is_free = np.ones(num_pages, bool)
        self._is_free[0] = False

    def allocate(self, n: int) -> np.ndarray:
        """int32[n] ids, the caller's until it frees them. The caller checked n ≤ num_free."""
        assert 0 <= n <= self.num_free, f"{n=} {self.num_free=}"
        self.num_free -= n
        pages = self._stack[self.num_free : self.num_free + n].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give ids back. Twice, or the trash page, is a bug of the caller."""
        n = len(pages)
        assert self.num_free + n <= self.total, f"{n=} {self.num_free=} {self.total=}"
        assert not self._is_free[pages].any() and (n == 0 or pages.min() > 0), f"not owned: {pages}"
        self._stack[self.num_free : self.num_free + n] = pages
        self._is_free[pages] = True
        self.num_free += n

    def free_pages(self) -> np.ndarray:
        """The free ids, for integrity checks."""
        return self._stack[: self.num_free]
