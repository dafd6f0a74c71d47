"""CacheManager against a brute-force model: a dict from prefix to page, and sets of pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from random_runs import run_rounds

from jserve.cache.integrity import nodes
from jserve.cache.manager import CacheManager, Lease

NAMESPACES = [(None, None), (None, None), ("lora", None), (None, "salt")]
Prefix = tuple[object, tuple[int, ...]]


@dataclasses.dataclass
class ModelLease:
    lease: Lease
    namespace: tuple
    tokens: list[int]
    pages: list[int]
    num_shared: int
    sealed: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """`cached` maps each cached page's whole prefix to (page, time of last use)."""

    page_size = 1
    num_pages = 20
    evictions = 0
    duplicates = 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(self.num_pages, self.page_size)
        self.cached: dict[Prefix, tuple[int, int]] = {}
        self.leases: list[ModelLease] = []
        self.time = 0

    def prefixes(self, namespace: object, tokens: list[int]) -> list[Prefix]:
        n = len(tokens) // self.page_size
        return [(namespace, tuple(tokens[: (i + 1) * self.page_size])) for i in range(n)]

    def touch(self, prefixes: list[Prefix]) -> None:
        self.time += 1
        for prefix in prefixes:
            self.cached[prefix] = (self.cached[prefix][0], self.time)

    def locked(self) -> set[Prefix]:
        return {
            prefix
            for held in self.leases
            for prefix in self.prefixes(held.namespace, held.tokens)[: held.num_shared]
        }

    def actual(self) -> dict[Prefix, int]:
        """What the real tree holds, read node by node."""
        held: dict[Prefix, int] = {}
        stack = [(child, (), edge[0]) for edge, child in self.manager.tree.root.children.items()]
        while stack:
            node, before, namespace = stack.pop()
            tokens = before + tuple(node.key.tolist())
            for i, page in enumerate(node.pages.tolist()):
                end = len(before) + (i + 1) * self.page_size
                held[namespace, tokens[:end]] = page
            stack += [(child, tokens, namespace) for child in node.children.values()]
        return held

    @rule(
        pages=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=6),
        tail=st.integers(0, 15),
        namespace=st.sampled_from(NAMESPACES),
        room=st.integers(0, 9),
        fill=st.integers(0, 3),
    )
    def open(self, pages: list[int], tail: int, namespace: tuple, room: int, fill: int) -> None:
        """Pages of a prompt differ in their last token only. Most prompts get all their pages."""
        tokens = [t for p in pages for t in [0] * (self.page_size - 1) + [p]]
        tokens += [1] * (tail % self.page_size)
        limit = min(len(tokens), room * self.page_size + tail % 3)
        expected: list[Prefix] = []
        for prefix in self.prefixes(namespace, tokens[:limit]):
            if prefix not in self.cached:
                break
            expected.append(prefix)
        array = np.array(tokens, np.int32)
        lease = self.manager.open(array, namespace, limit)
        assert lease.pages.tolist() == [self.cached[prefix][0] for prefix in expected]
        self.touch(expected)
        model = ModelLease(lease, namespace, tokens, lease.pages.tolist(), len(expected))
        self.leases.append(model)
        if fill:
            self.allocate(model, -(-len(tokens) // self.page_size) - len(expected))

    @precondition(lambda self: self.leases)
    @rule(
        which=st.integers(0, 99), n=st.integers(0, 8), grow=st.lists(st.integers(0, 1), max_size=4)
    )
    def extend(self, which: int, n: int, grow: list[int]) -> None:
        """Allocate pages, evicting in LRU order if needed; the request's output may have grown
        meanwhile.
        """
        held = self.leases[which % len(self.leases)]
        held.tokens += [t for p in grow for t in [0] * (self.page_size - 1) + [p]]
        n = min(n, -(-len(held.tokens) // self.page_size) - len(held.pages))
        if n >= 0:
            self.allocate(held, n)

    def allocate(self, held: ModelLease, n: int) -> None:
        locked = self.locked()
        private = sum(len(h.pages) - h.num_shared for h in self.leases)
        free = self.num_pages - 1 - private - len(self.cached)
        pages = self.manager.allocate(n)
        assert (pages is None) == (n > free + len(self.cached.keys() - locked))
        if pages is None:
            return
        before, self.cached = self.cached, {p: self.cached[p] for p in self.actual()}
        gone = before.keys() - self.cached.keys()
        assert len(gone) == max(0, n - free) and not gone & locked
        inner = {(ns, run[: -self.page_size]) for ns, run in self.cached}
        leaves = [use for p, (_, use) in self.cached.items() if p not in inner and p not in locked]
        assert not gone or not leaves or max(before[p][1] for p in gone) <= min(leaves)
        type(self).evictions += len(gone)
        held.lease.extend(pages)
        held.pages += pages.tolist()

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        held = self.leases[which % len(self.leases)]
        valid = min(len(held.tokens), len(held.pages) * self.page_size)
        self.manager.commit(held.lease, np.array(held.tokens[:valid], np.int32))
        run = self.prefixes(held.namespace, held.tokens[:valid])
        if held.sealed or len(run) <= held.num_shared:
            return
        if run[held.num_shared] in self.cached:
            held.sealed = True
            type(self).duplicates += 1
            return
        for i in range(held.num_shared, len(run)):
            self.cached[run[i]] = (held.pages[i], 0)
        self.touch(run)
        held.num_shared = len(run)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), lost=st.integers(0, 2))
    def finish(self, which: int, lost: int) -> None:
        held = self.leases.pop(which % len(self.leases))
        valid = min(len(held.tokens), len(held.pages) * self.page_size)
        valid = max(valid - lost, held.num_shared * self.page_size)
        self.manager.finish(held.lease, np.array(held.tokens[:valid], np.int32))
        run = self.prefixes(held.namespace, held.tokens[:valid])
        for i in range(held.num_shared, len(run)):
            self.cached.setdefault(run[i], (held.pages[i], 0))
        if len(run) > held.num_shared:
            self.touch(run)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.manager.release(self.leases.pop(which % len(self.leases)).lease)

    @rule()
    def flush(self) -> None:
        if not self.leases:
            self.manager.reset()
            self.cached = {}

    @invariant()
    def equals_the_model(self) -> None:
        self.manager.check_integrity()
        assert self.actual() == {prefix: page for prefix, (page, _) in self.cached.items()}
        for held in self.leases:
            assert held.lease.pages.tolist() == held.pages
            assert held.lease.num_shared == held.num_shared
        assert self.manager.tree.protected_pages == len(self.locked())


def run_machine(
    page_size: int, examples: int, steps: int, first_seed: int = 0
) -> type[ManagerMachine]:
    machine = type(f"Manager{page_size}", (ManagerMachine,), {"page_size": page_size})
    met = lambda: machine.evictions > 0 and machine.duplicates > 0  # noqa: E731
    run_rounds(machine, examples, steps, met, 4, first_seed)
    return machine


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_manager_equals_a_dict_of_prefixes_under_random_operations(page_size: int):
    machine = run_machine(page_size, examples=200, steps=40)
    assert machine.evictions > 0 and machine.duplicates > 0


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_manager_equals_a_dict_of_prefixes_under_very_many_operations(page_size: int):
    run_machine(page_size, examples=400, steps=100)


def tokens(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def grown(manager: CacheManager, run: np.ndarray, max_tokens: int | None = None) -> Lease:
    """A lease with pages for all of `run`."""
    lease = manager.open(run, (None, None), len(run) - 1 if max_tokens is None else max_tokens)
    pages = manager.allocate(-(-len(run) // manager.page_size) - lease.num_pages)
    assert pages is not None
    lease.extend(pages)
    return lease


def test_a_running_prompts_pages_are_shared_with_a_later_one():
    manager = CacheManager(16, 4)
    first = grown(manager, tokens(12))
    manager.commit(first, tokens(12))
    second = manager.open(tokens(12), (None, None), 11)
    assert second.pages.tolist() == first.pages[:2].tolist()


def test_duplicates_stay_private_and_are_freed_at_finish():
    manager = CacheManager(16, 4)
    first, second = grown(manager, tokens(8)), grown(manager, tokens(8))
    assert not set(first.pages.tolist()) & set(second.pages.tolist())
    manager.commit(first, tokens(8))
    manager.commit(second, tokens(8))
    assert second.sealed and second.num_shared == 0
    manager.finish(first, tokens(8))
    manager.finish(second, tokens(8))
    assert manager.tree.evictable_pages == 2 and manager.available_pages == manager.total_pages
    manager.check_integrity()


def test_chunks_of_one_prompt_become_one_node():
    manager = CacheManager(64, 4)
    lease = grown(manager, tokens(160))
    for end in range(16, 161, 16):
        manager.commit(lease, tokens(160)[:end])
    assert len(list(nodes(manager.tree))) == 1
    manager.check_integrity()


def test_without_radix_nothing_is_reused_and_nothing_leaks():
    manager = CacheManager(16, 4, radix=False)
    for _ in range(3):
        lease = grown(manager, tokens(20))
        assert lease.num_shared == 0
        manager.commit(lease, tokens(20))
        manager.finish(lease, tokens(20))
        assert manager.allocator.num_free == manager.total_pages
    manager.check_integrity()


def test_allocation_beyond_what_can_be_freed_is_refused_and_counted():
    manager = CacheManager(8, 4)
    grown(manager, tokens(20))
    assert manager.allocate(3) is None and manager.counters.allocator_failures == 1
    assert manager.allocate(2) is not None


def test_integrity_check_finds_a_lock_that_was_never_released():
    manager = CacheManager(8, 4)
    lease = grown(manager, tokens(8))
    manager.finish(lease, tokens(8))
    node, _ = manager.tree.match(tokens(8), (None, None))
    manager.tree.lock(node)
    with pytest.raises(AssertionError, match="lock counts"):
        manager.check_integrity()


def test_integrity_check_finds_a_lock_that_was_released_too_early():
    manager = CacheManager(8, 4)
    lease = grown(manager, tokens(8))
    manager.commit(lease, tokens(8))
    manager.tree.unlock(lease.node)
    with pytest.raises(AssertionError, match="lock counts"):
        manager.check_integrity()


def test_integrity_check_finds_a_page_without_an_owner():
    manager = CacheManager(8, 4)
    manager.allocator.allocate(1)
    with pytest.raises(AssertionError, match="exactly one owner"):
        manager.check_integrity()
