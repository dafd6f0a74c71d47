"""The free list: ids are given once, come back once, and the trash page is never among them."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.cache.pages import PageAllocator


def test_all_pages_but_the_trash_page_are_given_once():
    pages = PageAllocator(9)
    given = np.concatenate([pages.allocate(3), pages.allocate(0), pages.allocate(5)])
    assert sorted(given.tolist()) == list(range(1, 9))
    assert pages.num_free == 0 and pages.total == 8


def test_freed_pages_are_given_again_and_earlier_results_do_not_change():
    pages = PageAllocator(5)
    first = pages.allocate(4)
    kept = first.copy()
    pages.free(first[1:3])
    assert sorted(pages.allocate(2).tolist()) == sorted(kept[1:3].tolist())
    assert first.tolist() == kept.tolist()


@pytest.mark.parametrize("bad", [[2], [0]])
def test_freeing_a_free_page_or_the_trash_page_is_a_bug(bad: list[int]):
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(AssertionError):
        pages.free(np.array(bad, np.int32))


def test_asking_for_more_than_there_is_is_a_bug():
    with pytest.raises(AssertionError):
        PageAllocator(4).allocate(4)
