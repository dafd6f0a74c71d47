"""Eviction: each policy's victim, the heap against a search of all leaves, and what requests leave
behind that the policies ask for: hits and priorities.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jserve.cache.eviction import EVICTION_POLICIES, Evictor, eviction_policy
from jserve.cache.integrity import nodes
from jserve.cache.manager import CacheManager, Lease
from jserve.cache.radix import Namespace, Node, RadixTree
from jserve.config import Config, DeviceFacts, resolve
from jserve.errors import ConfigError
from jserve.types import ModelConfig, RopeConfig

NONE: Namespace = (None, None)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def begin(manager: CacheManager, tokens: list[int], priority: int = 0) -> Lease:
    """A request whose prompt is computed and published."""
    lease = manager.open(ids(*tokens), NONE, len(tokens) - 1, priority)
    pages = manager.allocate(-(-len(tokens) // manager.page_size) - lease.num_pages)
    assert pages is not None
    lease.extend(pages)
    manager.commit(lease, ids(*tokens))
    return lease


def serve(
    manager: CacheManager, prompt: list[int], output: tuple[int, ...] = (), priority: int = 0
) -> None:
    """One request from its beginning to its end."""
    lease = begin(manager, prompt, priority)
    whole = [*prompt, *output]
    pages = manager.allocate(-(-len(whole) // manager.page_size) - lease.num_pages)
    assert pages is not None
    lease.extend(pages)
    manager.finish(lease, ids(*whole), len(prompt))


def cached(manager: CacheManager, tokens: list[int]) -> int:
    """Tokens of a prefix that are in the cache, without touching it."""
    pages = manager.tree.find(manager.tree.root, ids(*tokens), NONE)[1]
    return pages * manager.page_size


def node_of(manager: CacheManager, tokens: list[int]) -> Node:
    return manager.tree.find(manager.tree.root, ids(*tokens), NONE)[0]


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        ("lru", [4, 1, 2, 3]),  # last use: 4 first, then 1, 2, 3
        ("fifo", [1, 2, 3, 4]),  # as they came
        ("lfu", [4, 3, 1, 2]),  # requests: one, two, three, three
        ("slru", [4, 3, 1, 2]),  # below the threshold of three: 4 and 3
        ("priority", [2, 4, 1, 3]),  # the highest that used it: −1, 0, 5, 7
    ],
)
def test_each_policy_evicts_in_its_own_order(policy: str, victims: list[int]):
    manager = CacheManager(20, 1, eviction=policy, protected_threshold=3)
    requests = [1, 2, 3, 4, 1, 1, 2, 2, 3]
    priorities = {1: 5, 2: -1, 3: 7, 4: 0}
    for first in requests:
        serve(manager, [first, 9], priority=priorities[first])
    order = []
    for _ in victims:
        before = {first for first in priorities if cached(manager, [first])}
        manager.evict(2)
        order += before - {first for first in priorities if cached(manager, [first])}
    assert order == victims
    assert manager.counters.evicted_pages == 8


def test_slru_protects_what_two_requests_used_by_default_and_more_if_told():
    for threshold, victim in ((2, [3]), (3, [1])):
        manager = CacheManager(20, 1, eviction="slru", protected_threshold=threshold)
        for first in (1, 1, 3):
            serve(manager, [first, 9])
        if threshold == 3:  # then both are on probation and the last use counts
            serve(manager, [3, 9])
            serve(manager, [3, 9])
        manager.evict(1)
        gone = [first for first in (1, 3) if cached(manager, [first, 9]) < 2]
        assert gone == victim


def test_a_hit_is_counted_once_per_request_however_often_it_was_tried_or_retracted():
    manager = CacheManager(40, 1, eviction="lfu")
    serve(manager, [1, 2, 3])
    assert node_of(manager, [1, 2, 3]).hit_count == 1
    for _ in range(5):  # admission finds no room and gives the lease back
        manager.release(manager.open(ids(1, 2, 3, 4), NONE, 3))
    assert node_of(manager, [1, 2, 3]).hit_count == 1
    manager.release(begin(manager, [1, 2, 3, 4]))  # it runs, and is retracted
    serve(manager, [1, 2, 3, 4])
    assert node_of(manager, [1, 2, 3]).hit_count == 2
    assert node_of(manager, [1, 2, 3, 4]).hit_count == 1


def test_a_run_of_others_is_not_lengthened_so_that_new_pages_inherit_no_hits():
    manager = CacheManager(40, 1, eviction="lfu")
    for _ in range(3):
        serve(manager, [1, 2, 3])
    serve(manager, [1, 2, 3, 4, 5])
    assert node_of(manager, [1, 2, 3]).hit_count == 4
    assert node_of(manager, [1, 2, 3, 4, 5]).hit_count == 1


def test_a_nodes_priority_is_the_highest_of_those_that_inserted_it_or_a_run_below_it():
    manager = CacheManager(60, 1)
    for prompt, priority in (([1, 2], -3), ([1, 2, 3], 4), ([1, 2, 7], 1), ([1, 2, 3], 2)):
        serve(manager, prompt, priority=priority)
    found = {tuple(run): node_of(manager, run).priority for run in ([1, 2], [1, 2, 3], [1, 2, 7])}
    assert found == {(1, 2): 4, (1, 2, 3): 4, (1, 2, 7): 1}
    manager.release(begin(manager, [1, 2, 7, 8], priority=9))  # retracted: its prompt stays
    assert node_of(manager, [1, 2, 7, 8]).priority == node_of(manager, [1, 2]).priority == 9
    manager.release(manager.open(ids(1, 2, 7, 8), NONE, 4, 20))  # never admitted
    assert node_of(manager, [1, 2, 7, 8]).priority == 9
    manager.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4])
def test_under_priority_a_finished_requests_prompt_outlives_its_output(page_size: int):
    manager = CacheManager(60, page_size, eviction="priority")
    prompt, output = [1] * 8, (2,) * 8
    serve(manager, prompt, output, priority=3)
    pages = 8 // page_size
    assert [(len(n.pages), n.priority) for n in nodes(manager.tree)] == [(pages, 4), (pages, 3)]
    serve(manager, [9] * 8, priority=3)  # used later, but a prompt as well
    serve(manager, [7] * 8, (7,) * 8, priority=2)  # its prompt is worth 3: as the first output
    manager.evict(pages)
    assert cached(manager, [7] * 16) == 8 and cached(manager, prompt + list(output)) == 16
    manager.evict(pages)
    assert cached(manager, prompt + list(output)) == 8 and cached(manager, [7] * 8) == 8
    manager.check_integrity()


def test_under_priority_a_prompt_that_ends_inside_a_page_is_split_at_the_page():
    manager = CacheManager(40, 4, eviction="priority")
    serve(manager, [1] * 6, (1,) * 10)
    assert [(len(n.pages), n.priority) for n in nodes(manager.tree)] == [(1, 1), (3, 0)]
    manager.check_integrity()


def test_other_policies_do_not_split_at_the_prompt():
    for policy in EVICTION_POLICIES:
        manager = CacheManager(40, 1, eviction=policy)
        lease = begin(manager, [1] * 4)
        for _ in range(4):  # output is published at the end only
            lease.extend(manager.allocate(1))
        manager.finish(lease, ids(*[1] * 8), 4)
        sizes = sorted(len(node.pages) for node in nodes(manager.tree))
        assert sizes == [4, 4], policy  # the prompt's node, the output's
        lease = manager.open(ids(*[1] * 8), NONE, 7)
        manager.finish(lease, ids(*[1] * 6), 2)
        assert len(list(nodes(manager.tree))) == (4 if policy == "priority" else 3), policy


def brute_force(tree: RadixTree, evictor: Evictor, n: int) -> list[int]:
    """The pages that should go, one at a time: the last one of the least of all unlocked leaves."""
    left = {node: len(node.pages) for node in nodes(tree)}
    children = Counter(node.parent for node in left)
    order: list[int] = []
    while len(order) < n:
        leaves = [node for node in left if not children[node] and not node.lock_ref]
        if not leaves:
            break
        victim = min(leaves, key=evictor.key)
        left[victim] -= 1
        order.append(int(victim.pages[left[victim]]))
        if not left[victim]:
            del left[victim]
            children[victim.parent] -= 1
    return order


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("page_size", [1, 3])
def test_the_heap_takes_what_a_search_of_all_leaves_would(policy: str, page_size: int):
    """Random use: keys grow under the heap, leaves are locked, unlocked, split and grown."""
    rng = np.random.default_rng(len(policy) * 10 + page_size)
    manager = CacheManager(4000, page_size, eviction=policy)
    evictor = manager._evictor
    leases: list[tuple[Lease, np.ndarray]] = []
    happened: Counter[str] = Counter()
    for _ in range(1500):
        draw = rng.random()
        if draw < 0.45:
            depth = int(rng.integers(1, 7))
            runs = rng.choice(4, size=depth, p=[0.55, 0.25, 0.15, 0.05])
            tokens = np.repeat(runs, page_size * int(rng.integers(1, 3))).astype(np.int32)
            lease = manager.open(tokens, NONE, len(tokens), int(rng.integers(-2, 3)))
            pages = manager.allocate(len(tokens) // page_size - lease.num_pages)
            assert pages is not None
            lease.extend(pages)
            if rng.random() < 0.7:
                manager.commit(lease, tokens)
            leases.append((lease, tokens))
        elif draw < 0.8 and leases:
            lease, tokens = leases.pop(int(rng.integers(len(leases))))
            happened["finished"] += 1
            if rng.random() < 0.8:
                manager.finish(lease, tokens, int(rng.integers(0, len(tokens))))
            else:
                manager.release(lease)
        else:
            n = int(rng.integers(0, 5))
            expected = brute_force(manager.tree, evictor, n)
            happened["stale"] += sum(known < evictor.key(node) for known, _, node in evictor.heap)
            happened["locked"] += sum(node.lock_ref > 0 for _, _, node in evictor.heap)
            freed = evictor.evict(n)
            manager.allocator.free(freed)
            assert sorted(freed.tolist()) == sorted(expected), policy
            happened["evicted"] += len(freed)
            happened["part of a node"] += any(len(node.pages) > n for node in nodes(manager.tree))
        manager.check_integrity()
    if policy == "fifo":  # creation never changes
        assert happened.pop("stale") == 0
    assert min(happened.values()) > 0 and happened["evicted"] > 200, happened


def test_a_check_finds_what_eviction_has_lost_or_would_take_too_late():
    def made() -> CacheManager:
        manager = CacheManager(40, 1)
        for first in (1, 2, 3):
            serve(manager, [first, 9])
        manager.evict(1)  # the others are in the heap now
        manager.check_integrity()
        return manager

    manager = made()
    manager._evictor.heap.pop()
    with pytest.raises(AssertionError, match="leaves of"):
        manager.check_integrity()
    manager = made()
    node_of(manager, [3, 9]).last_access = 0
    with pytest.raises(AssertionError, match="shrank"):
        manager.check_integrity()
    manager = made()
    manager.tree.offers.append(node_of(manager, [3, 9]))
    with pytest.raises(AssertionError, match="twice"):
        manager.check_integrity()
    manager = made()
    serve(manager, [3, 9, 9])
    node_of(manager, [3, 9, 9]).priority = 5
    with pytest.raises(AssertionError, match="above their parents"):
        manager.check_integrity()


def test_what_was_matched_and_evicted_is_counted():
    manager = CacheManager(12, 2)
    serve(manager, [1] * 8)
    serve(manager, [1] * 8 + [2] * 4)
    serve(manager, [3] * 12)
    counters = manager.counters
    assert counters.matched_tokens == 8 and sum(counters.match_lengths) == 3
    assert counters.match_lengths[0] == 2 and counters.match_lengths[(8).bit_length()] == 1
    assert counters.evicted_pages == 1
    lease = begin(manager, [1] * 8)
    assert len(manager.leases) == 1 and manager.tree.protected_pages == 3
    assert manager.allocate(99) is None and counters.allocator_failures == 1
    manager.release(lease)
    assert not manager.leases


MODEL = ModelConfig(
    architecture="X",
    vocab_size=256,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position=512,
    rope=RopeConfig(10_000.0),
    windows=(None,),
)


def resolved(**flags: object):
    config = Config.from_flags(model_path="smollm2-135m", **flags)
    return resolve(config, MODEL, DeviceFacts("cpu", "cpu", 1, 1 << 33))


def test_the_policy_and_its_number_are_options():
    assert (resolved().eviction, resolved().protected_threshold) == ("lru", 2)
    for policy in EVICTION_POLICIES:
        assert resolved(radix_eviction_policy=policy).eviction == policy
        assert eviction_policy(policy).key
    config = '{"protected_threshold": 5}'
    settings = resolved(radix_eviction_policy="slru", radix_eviction_policy_config=config)
    assert settings.protected_threshold == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"radix_eviction_policy": "mru"}, "must be one of"),
        ({"radix_eviction_policy_config": "{"}, "is for --radix-eviction-policy slru, not lru"),
        ({"config": "{"}, "is not JSON"),
        ({"config": "[2]"}, "must be a JSON object"),
        ({"config": '{"protected_treshold": 2}'}, "did you mean protected_threshold"),
        ({"config": '{"protected_threshold": "2"}'}, "must be int"),
        ({"config": '{"protected_threshold": true}'}, "must be int"),
        ({"config": '{"protected_threshold": 0}'}, "must be >= 1"),
        ({"radix_eviction_policy": "lfu", "disable_radix_cache": True}, "--disable-radix-cache"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_in_words(flags: dict[str, object], words: str):
    if "config" in flags:
        flags = {
            "radix_eviction_policy": "slru",
            "radix_eviction_policy_config": flags["config"],
        }
    with pytest.raises(ConfigError, match=words) as error:
        resolved(**flags)
    assert "--radix-eviction-policy" in str(error.value)
