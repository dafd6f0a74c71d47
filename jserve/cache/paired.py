"""The full pool's page ids where layers with a window have pools beside it: whoever takes or gives
back a full page does so with what lies beside it. Other models have a plain PageAllocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jserve.cache.pages import PageAllocator


class Group(Protocol):
    """What is used of window.WindowGroup."""

    def reset(self) -> None: ...

    def back(self, pages: np.ndarray) -> None: ...

    def drop(self, pages: np.ndarray) -> int: ...


class PairedAllocator:
    """As PageAllocator, of full pages. The caller of `allocate` has room in every group."""

    def __init__(self, pages: PageAllocator, groups: Sequence[Group]) -> None:
        self._pages, self._groups = pages, groups
        self.total = pages.total

    @property
    def num_free(self) -> int:
        return self._pages.num_free

    def allocate(self, n: int) -> np.ndarray:
        pages = self._pages.allocate(n)
        for group in self._groups:
            group.back(pages)
        return pages

    def free(self, pages: np.ndarray) -> None:
        for group in self._groups:
            group.drop(pages)
        self._pages.free(pages)

    def free_pages(self) -> np.ndarray:
        return self._pages.free_pages()


Allocator = PageAllocator | PairedAllocator


def make_allocator(num_pages: int, groups: Sequence[Group]) -> Allocator:
    """Everything is free, in the groups too."""
    pages = PageAllocator(num_pages)
    for group in groups:
        group.reset()
    return PairedAllocator(pages, groups) if groups else pages
