"""The tree by itself: matches in whole pages, namespaces, splits, locks and eviction order."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jserve.cache.eviction import Evictor
from jserve.cache.integrity import nodes
from jserve.cache.radix import Namespace, RadixTree

NONE: Namespace = (None, None)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def add(tree: RadixTree, tokens: np.ndarray, first_page: int, namespace: Namespace = NONE) -> int:
    n = len(tokens) // tree.page_size
    pages = np.arange(first_page, first_page + n, dtype=np.int32)
    return tree.insert(tree.root, tokens[: n * tree.page_size], pages, namespace)[1]


def found(tree: RadixTree, tokens: np.ndarray, namespace: Namespace = NONE) -> list[int]:
    return tree.match(tokens, namespace)[1].tolist()


def test_a_match_is_whole_pages_and_stops_at_the_first_token_that_differs():
    tree = RadixTree(2)
    add(tree, ids(1, 2, 3, 4, 5, 6), 10)
    assert found(tree, ids(1, 2, 3, 4, 5, 6, 7)) == [10, 11, 12]
    assert found(tree, ids(1, 2, 3, 9, 5, 6)) == [10]
    assert found(tree, ids(1, 2, 3)) == [10]
    assert found(tree, ids(1, 9)) == [] and found(tree, ids(2, 1)) == []


def test_a_split_keeps_locks_pages_and_the_locked_nodes_identity():
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3, 4), 10)
    node, _ = tree.match(ids(1, 2, 3, 4), NONE)
    tree.lock(node)
    upper, _ = tree.match(ids(1, 2), NONE)
    assert node.parent is upper and upper.lock_ref == 1
    assert upper.pages.tolist() == [10, 11] and node.pages.tolist() == [12, 13]
    assert tree.protected_pages == 4 and tree.evictable_pages == 0
    tree.unlock(node)
    assert tree.protected_pages == 0 and tree.evictable_pages == 4


def test_insert_says_how_much_was_there_and_takes_only_the_rest():
    tree = RadixTree(2)
    add(tree, ids(1, 2, 3, 4), 10)
    assert add(tree, ids(1, 2, 3, 4, 5, 6), 20) == 2
    assert add(tree, ids(1, 2, 7, 8), 30) == 1
    assert found(tree, ids(1, 2, 3, 4, 5, 6)) == [10, 11, 22]
    assert found(tree, ids(1, 2, 7, 8)) == [10, 31]
    assert tree.evictable_pages == 4


@pytest.mark.parametrize("other", [("lora", None), (None, "salt"), ("", None), ("a", "b")])
def test_namespaces_never_share(other: Namespace):
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3), 10)
    assert found(tree, ids(1, 2, 3), other) == []
    add(tree, ids(1, 2, 3), 20, other)
    assert found(tree, ids(1, 2, 3), other) == [20, 21, 22]
    assert found(tree, ids(1, 2, 3)) == [10, 11, 12]


def test_eviction_takes_the_least_recently_used_leaf_from_its_end_and_then_its_parent():
    tree = RadixTree(1)
    evictor = Evictor(tree)
    add(tree, ids(1, 2, 3, 4), 10)
    add(tree, ids(1, 2, 8, 9), 20)
    assert found(tree, ids(1, 2, 3, 4)) == [10, 11, 12, 13]
    assert evictor.evict(1).tolist() == [23]
    assert evictor.evict(2).tolist() == [22, 13]
    assert found(tree, ids(1, 2, 3, 4)) == [10, 11, 12]
    assert sorted(evictor.evict(99).tolist()) == [10, 11, 12]
    assert not list(nodes(tree)) and tree.evictable_pages == 0


def test_a_locked_path_is_never_evicted():
    tree = RadixTree(1)
    evictor = Evictor(tree)
    add(tree, ids(1, 2, 3), 10)
    add(tree, ids(1, 2, 8), 20)
    node, _ = tree.match(ids(1, 2, 3), NONE)
    tree.lock(node)
    assert evictor.evict(99).tolist() == [22]
    assert len(evictor.evict(99)) == 0
    tree.unlock(node)
    assert len(evictor.evict(99)) == 3


def test_match_and_insert_of_32k_tokens_take_a_millisecond_or_less():
    tree, best = RadixTree(16), {"match": 9.0, "insert": 9.0}
    rng = np.random.default_rng(0)
    for i in range(20):
        tokens = rng.integers(0, 50_000, 32_768).astype(np.int32)
        start = time.perf_counter()
        add(tree, tokens, 1 + 2048 * i)
        inserted = time.perf_counter()
        assert len(found(tree, tokens)) == 2048
        matched = time.perf_counter()
        best["insert"] = min(best["insert"], inserted - start)
        best["match"] = min(best["match"], matched - inserted)
    print({name: f"{seconds * 1e6:.0f} us" for name, seconds in best.items()})
    assert best["match"] < 1e-3 and best["insert"] < 1e-3
