"""KV of a request that ended on NaN: no later match has it, no page is lost or told of twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fake_engine import PAGE, make_scheduler

from jserve.cache.integrity import nodes
from jserve.cache.manager import CacheManager, Lease
from jserve.cache.observer import Observer
from jserve.cache.window import WindowGroup
from jserve.plan import StepOutcome
from jserve.types import SamplingParams, Submit

SPACE = (None, None)


class Told:
    """What an observer of the cache believes to be in it: pages. Nothing is told twice."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.observer = Observer(self.stored, self.removed, self.pages.clear, self.num_pages)

    def stored(
        self, parent: np.ndarray, tokens: np.ndarray, pages: np.ndarray, space: object
    ) -> None:
        assert self.pages.isdisjoint(pages.tolist())
        assert set(parent.tolist()) <= self.pages, "behind something that is gone"
        self.pages |= set(pages.tolist())

    def removed(self, pages: np.ndarray) -> None:
        assert self.pages >= set(pages.tolist())
        self.pages -= set(pages.tolist())

    def num_pages(self) -> int:
        return len(self.pages)


def tokens(*pages: int) -> np.ndarray:
    """Of one page each, which differ in their last token."""
    return np.array([t for page in pages for t in [0] * (PAGE - 1) + [page]], np.int32)


def published(manager: CacheManager, run: np.ndarray) -> Lease:
    """A lease that has published all of `run`, but for what was there before."""
    lease = manager.open(run, SPACE, len(run))
    pages = manager.allocate(len(run) // PAGE - lease.num_pages)
    assert pages is not None
    lease.extend(pages)
    manager.commit(lease, run)
    return lease


def cached(manager: CacheManager, run: np.ndarray) -> int:
    """Pages of it that a new request would get."""
    return manager.tree.find(manager.tree.root, run, SPACE)[1]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def manager(told: Told) -> CacheManager:
    return CacheManager(64, PAGE, observer=told.observer)


def test_what_a_discarded_lease_has_published_is_gone_and_what_it_had_matched_stays(
    manager: CacheManager, told: Told
) -> None:
    manager.finish(published(manager, tokens(1, 2)), tokens(1, 2))
    bad = published(manager, tokens(1, 2, 3, 4))
    assert cached(manager, tokens(1, 2, 3, 4)) == 4
    manager.discard(bad)
    assert cached(manager, tokens(1, 2, 3, 4)) == 2 == len(told.pages)
    assert manager.allocator.num_free == manager.total_pages - 2
    manager.check_integrity()


def test_a_node_that_it_had_matched_and_lengthened_is_cut_where_it_began(
    manager: CacheManager,
) -> None:
    manager.release(published(manager, tokens(1, 2)))  # nobody has finished with it
    bad = published(manager, tokens(1, 2, 3))
    assert len(list(nodes(manager.tree))) == 1, "one node holds both"
    manager.discard(bad)
    assert cached(manager, tokens(1, 2, 3)) == 2
    manager.check_integrity()


def test_a_discarded_lease_that_has_published_nothing_leaves_all_as_it_was(
    manager: CacheManager,
) -> None:
    manager.finish(published(manager, tokens(1, 2)), tokens(1, 2))
    bad = manager.open(tokens(1, 2, 3), SPACE, 3 * PAGE)
    pages = manager.allocate(1)
    assert pages is not None
    bad.extend(pages)
    manager.discard(bad)
    assert cached(manager, tokens(1, 2)) == 2
    assert manager.allocator.num_free == manager.total_pages - 2
    manager.check_integrity()


def test_who_reads_it_already_goes_on_and_nobody_else_finds_it(
    manager: CacheManager, told: Told
) -> None:
    bad = published(manager, tokens(1, 2))
    reader = published(manager, tokens(1, 2, 3))
    over = published(manager, tokens(1, 2, 9))
    manager.finish(over, tokens(1, 2, 9))
    manager.discard(bad)
    manager.check_integrity()
    assert cached(manager, tokens(1, 2, 3)) == 0 == len(told.pages)
    assert manager.allocator.num_free == manager.total_pages - 3, "the reader's pages"
    again = published(manager, tokens(1, 2, 3))  # cached anew beside it
    assert again.num_matched == 0 and set(again.pages).isdisjoint(reader.pages)
    pages = manager.allocate(1)
    assert pages is not None
    reader.extend(pages)
    manager.commit(reader, tokens(1, 2, 3, 4))
    assert cached(manager, tokens(1, 2, 3, 4)) == 3, "nothing is added to what is hidden"
    manager.finish(reader, tokens(1, 2, 3, 4), 2 * PAGE)
    assert cached(manager, tokens(1, 2, 3, 4)) == 3
    manager.finish(again, tokens(1, 2, 3))
    assert manager.allocator.num_free == manager.total_pages - 3 and len(told.pages) == 3
    manager.check_integrity()


def test_the_last_of_several_readers_takes_it_out_also_when_it_is_wrong_itself(
    manager: CacheManager, told: Told
) -> None:
    bad = published(manager, tokens(1))
    readers = [published(manager, tokens(1, *more)) for more in ((2,), (2, 3), (4,))]
    for lease in (bad, readers[1], readers[0]):
        manager.discard(lease)
        manager.check_integrity()
        assert cached(manager, tokens(1)) == 0 == len(told.pages)
    assert manager.allocator.num_free == manager.total_pages - 2
    manager.release(readers[2])
    assert manager.allocator.num_free == manager.total_pages
    manager.check_integrity()


@pytest.mark.parametrize(("eviction", "windowed"), [("lru", False), ("priority", True)])
def test_under_random_use_no_match_has_a_page_that_was_wrong(eviction: str, windowed: bool) -> None:
    rng, told, seen = np.random.default_rng(7), Told(), Counter[str]()
    groups = [WindowGroup(6, 8, num_pages=30, full_pages=40, page_size=PAGE)] if windowed else []
    manager = CacheManager(40, PAGE, observer=told.observer, eviction=eviction, groups=groups)
    live: list[tuple[Lease, np.ndarray, int]] = []  # and how many pages of it have been committed
    wrong: set[int] = set()  # pages, until they are free again
    for _ in range(3000):
        draw = rng.random()
        if draw < 0.45 and len(live) < 7:
            run = tokens(*rng.choice([0, 0, 1, 2], int(rng.integers(1, 6))).tolist())
            lease = manager.open(run, SPACE, len(run), int(rng.integers(3)))
            assert wrong.isdisjoint(lease.pages.tolist()), "matched what is wrong"
            pages = manager.allocate(len(run) // PAGE - lease.num_pages)
            if pages is None:
                manager.release(lease)
                continue
            wrong -= set(pages.tolist())
            seen["reused"] += lease.num_matched > 0
            lease.extend(pages)
            live.append((lease, run, lease.num_pages))
        elif draw < 0.68 and live:
            lease, run, num = live[int(rng.integers(len(live)))]
            manager.commit(lease, run[: num * PAGE])
        elif live:
            lease, run, num = live.pop(int(rng.integers(len(live))))
            if draw < 0.72:
                manager.release(lease)
            elif draw < 0.8:
                manager.finish(lease, run, PAGE)
            else:
                spoilt = lease.pages[lease.num_matched : lease.num_shared].tolist()
                seen["discarded"] += bool(spoilt)
                seen["shared"] += any(
                    not set(spoilt).isdisjoint(other.pages.tolist()) for other, *_ in live
                )
                wrong |= set(spoilt)
                manager.discard(lease)
                wrong -= set(manager.allocator.free_pages().tolist())
        seen["hidden"] += any(node.hidden for node in nodes(manager.tree))
        manager.check_integrity()
    assert all(seen[what] >= 5 for what in ("reused", "discarded", "shared", "hidden")), seen
    for lease, *_ in live:
        manager.release(lease)
    manager.check_integrity()
    assert not any(node.hidden for node in nodes(manager.tree))


def test_the_prompt_of_a_request_that_ended_on_nan_is_computed_again() -> None:
    scheduler, prompt = make_scheduler(depth=0), list(range(1, 41))
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    reused = []
    for rid, token in (("bad", -1), ("good", 5), ("after", 6)):
        scheduler.submit(Submit(rid=rid, prompt_ids=prompt, sampling=sampling))
        plan = scheduler.plan()
        assert plan is not None
        reused.append(len(prompt) - int(plan.q_lens[-1]))
        scheduler.commit(plan, StepOutcome(np.full(len(plan.slots), token, np.int32), None, None))
        scheduler.check_integrity()
    assert reused == [0, 0, 36]
