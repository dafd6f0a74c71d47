"""What the cache costs on the host for a prompt of 32k tokens, in a tree of ten thousand nodes, and
how long a check of a hundred thousand pages takes.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from jserve.cache.integrity import nodes
from jserve.cache.manager import CacheManager

LENGTH = 32_768
VOCAB = 50_000
NONE = (None, None)


def run(manager: CacheManager, tokens: np.ndarray, chunk: int = LENGTH) -> tuple[float, int]:
    """One request's way through the cache, → seconds in it and tokens matched. Page allocation
    counts as well.
    """
    start = time.perf_counter()
    lease = manager.open(tokens, NONE, len(tokens) - 1)
    matched = lease.num_pages * manager.page_size
    begin = matched
    while begin < len(tokens):
        end = min(begin + chunk, len(tokens))
        pages = manager.allocate(-(-end // manager.page_size) - lease.num_pages)
        assert pages is not None
        lease.extend(pages)
        manager.commit(lease, tokens[:end])
        begin = end
    manager.finish(lease, tokens, len(tokens))
    return time.perf_counter() - start, matched


def planted(page_size: int, num_nodes: int, deepest: np.ndarray, steps: int) -> CacheManager:
    """Conversations that fork, until there are so many nodes; `deepest` is a path of `steps`."""
    rng = np.random.default_rng(0)
    manager = CacheManager(6_000_000 // page_size, page_size)
    piece = LENGTH // steps
    for end in range(piece, LENGTH + 1, piece):
        fork = rng.integers(0, VOCAB, page_size)
        run(manager, np.concatenate([deepest[:end], fork]).astype(np.int32))
    heads = [rng.integers(0, VOCAB, 4 * page_size).astype(np.int32) for _ in range(40)]
    count = len(list(nodes(manager.tree)))
    while count < num_nodes:
        head = heads[int(rng.integers(len(heads)))]
        tail = rng.integers(0, VOCAB, page_size * int(rng.integers(1, 8))).astype(np.int32)
        whole = np.concatenate([head, tail])
        run(manager, whole)
        if rng.random() < 0.5 and len(whole) < 100 * page_size:
            heads[int(rng.integers(len(heads)))] = whole
        count += 1
    return manager


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_way_of_a_32k_prompt_through_the_cache_takes_a_millisecond_or_less(page_size: int):
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
    manager = planted(page_size, 10_000, prompt, 32)
    assert len(list(nodes(manager.tree))) > 9_000
    cold, warm, half = [], [], []
    for _ in range(8):
        fresh = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
        seconds, matched = run(manager, fresh)
        assert matched == 0
        cold.append(seconds)
        seconds, matched = run(manager, fresh)
        assert matched == LENGTH - page_size
        warm.append(seconds)
        seconds, matched = run(manager, prompt)
        assert matched >= LENGTH - page_size
        half.append(seconds)
    figures = {"cold": min(cold), "warm": min(warm), "warm, 32 nodes deep": min(half)}
    print(f"page size {page_size}:", {k: f"{s * 1e6:.0f} us" for k, s in figures.items()})
    assert max(figures.values()) < 1e-3, figures


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_whose_every_page_is_a_node_is_opened_and_released_in_3_ms(page_size: int):
    manager = CacheManager(3000, page_size)
    tree, node = manager.tree, manager.tree.root
    prompt = np.random.default_rng(5).integers(0, VOCAB, 2048 * page_size).astype(np.int32)
    for i, page in enumerate(manager.allocator.allocate(2048)):
        run = prompt[i * page_size : (i + 1) * page_size]
        node, _ = tree.insert(node, run, np.array([page], np.int32), NONE)
    assert sum(1 for _ in node.path()) == 2048
    best = 9.0
    for _ in range(30):
        start = time.perf_counter()
        lease = manager.open(prompt, NONE, len(prompt))
        manager.release(lease)
        best = min(best, time.perf_counter() - start)
        assert lease.num_pages == 2048
    manager.check_integrity()
    print(f"page size {page_size}: 2,048 nodes {best * 1e6:.0f} us")
    assert best < 3e-3


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_in_chunks_costs_little_more(page_size: int):
    rng = np.random.default_rng(2)
    manager = planted(page_size, 1000, rng.integers(0, VOCAB, LENGTH).astype(np.int32), 8)
    best = 9.0
    for _ in range(5):
        prompt = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
        best = min(best, run(manager, prompt, 2048)[0])
    print(f"page size {page_size}: 16 chunks {best * 1e6:.0f} us")
    assert best < 3e-3


@pytest.mark.parametrize("per_node", [1, 10, 100])
def test_a_check_of_100k_pages_is_cheap_enough_for_an_idle_tick(per_node: int):
    rng = np.random.default_rng(3)
    manager = CacheManager(120_000, 16)
    for _ in range(100_000 // per_node):
        run(manager, rng.integers(0, VOCAB, 16 * per_node).astype(np.int32))
    assert manager.tree.evictable_pages == 100_000
    start = time.perf_counter()
    manager.check_integrity()
    seconds = time.perf_counter() - start
    print(f"100k pages in nodes of {per_node}: {seconds * 1e3:.1f} ms")
    assert seconds < 1.0
