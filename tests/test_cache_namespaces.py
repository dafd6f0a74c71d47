"""Namespaces (extra key, cache salt) never share, and what is reused is whole pages, at any page
size: asserted of the scheduler's answers, by a runner that reads every row's context back from its
pages.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scripted_runner import Simulation, submit

from jserve.cache.manager import CacheManager
from jserve.cache.radix import Namespace

PAGE_SIZES = [1, 3, 16, 64]
#: All different; a careless join of the parts would make some of them equal.
NAMESPACES: list[Namespace] = [
    (None, None),
    ("", None),
    (None, ""),
    ("", ""),
    ("a", None),
    (None, "a"),
    ("a", "b"),
    ("ab", None),
    (None, "ab"),
    ("ab", ""),
    ("b", "a"),
]
PROMPT = [t % 50 + 8 for t in range(200)]


def simulation(page_size: int, num_tokens: int) -> Simulation:
    pages = num_tokens // page_size
    sizes = {"context_length": 512, "chunked_prefill_size": 64, "max_prefill_tokens": 4096}
    return Simulation(page_size=page_size, num_pages=pages, **sizes)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_of_different_namespaces_never_share(page_size: int):
    sim = simulation(page_size, 8000)
    for i, (extra_key, cache_salt) in enumerate(NAMESPACES):
        keys = {"extra_key": extra_key, "cache_salt": cache_salt}
        sim.scheduler.submit(submit(f"first{i}", PROMPT, 3, **keys))
    sim.run()
    reusable = 199 // page_size * page_size
    for i, (extra_key, cache_salt) in enumerate(NAMESPACES):
        assert sim.deltas[f"first{i}"][-1].cached_tokens == 0, (extra_key, cache_salt)
        keys = {"extra_key": extra_key, "cache_salt": cache_salt}
        sim.scheduler.submit(submit(f"again{i}", PROMPT, 3, **keys))
    sim.run()
    for i in range(len(NAMESPACES)):
        assert sim.deltas[f"again{i}"][-1].cached_tokens == reusable
    sim.scheduler.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_page_is_in_two_namespaces(page_size: int):
    manager = CacheManager(4000 // page_size + 100, page_size)
    held: dict[Namespace, set[int]] = {}
    tokens = np.array(PROMPT, np.int32)
    for _, namespace in itertools.product(range(2), NAMESPACES):
        lease = manager.open(tokens, namespace, len(tokens) - 1)
        assert held.setdefault(namespace, set()).issuperset(lease.pages.tolist())
        assert bool(held[namespace]) == bool(len(lease.pages))
        pages = manager.allocate(-(-len(tokens) // page_size) - lease.num_pages)
        assert pages is not None
        lease.extend(pages)
        manager.finish(lease, tokens, len(tokens))
        whole = tokens[: len(tokens) // page_size * page_size]
        held[namespace].update(manager.tree.match(whole, namespace)[1].tolist())
    for one, other in itertools.combinations(held.values(), 2):
        assert one and not one & other
    manager.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_match_is_whole_pages_and_never_the_last_token_of_a_prompt(page_size: int):
    sim = simulation(page_size, 6000)
    sim.scheduler.submit(submit("seed", PROMPT, 1))
    sim.run()
    lengths = sorted({1, 2, page_size, page_size + 1, 2 * page_size, 3 * page_size - 1, 150, 200})
    for length in lengths:
        sim.scheduler.submit(submit(f"prefix{length}", PROMPT[:length], 2))
        sim.run()
        expected = (length - 1) // page_size * page_size
        assert sim.deltas[f"prefix{length}"][-1].cached_tokens == expected, length
        fork = [*PROMPT[: length - 1], 7, 7, 7]
        sim.scheduler.submit(submit(f"fork{length}", fork, 2, ignore_eos=True))
        sim.run()
        assert sim.deltas[f"fork{length}"][-1].cached_tokens == expected, length
    sim.scheduler.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_finished_request_leaves_its_whole_pages_and_frees_the_rest(page_size: int):
    manager = CacheManager(1000, page_size)
    for length in {1, page_size, page_size + 1, 5 * page_size - 1, 5 * page_size}:
        tokens = np.full(length, length, np.int32)
        lease = manager.open(tokens, (None, None), length - 1)
        pages = manager.allocate(-(-length // page_size))
        assert pages is not None
        lease.extend(pages)
        before = manager.tree.evictable_pages
        manager.finish(lease, tokens, length)
        assert manager.tree.evictable_pages - before == length // page_size
        cached = manager.tree.evictable_pages
        assert manager.allocator.num_free + cached == manager.total_pages
    manager.check_integrity()
