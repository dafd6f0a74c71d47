"""The cache room against brute force: radix tree, pages, eviction and manager under random
operations, every call compared with cache_model.py.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from cache_model import ORDERS, WatchedCache
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jserve.cache.manager import Lease

NAMESPACES = [(None, None), (None, None), ("lora", None), (None, "salt"), ("lora", "salt")]


class CacheMachine(RuleBasedStateMachine):
    """Leases that open, grow, publish and end in any order, in a pool that holds a few of them.
    Pages of a prompt differ in their last token only, so that most share something.
    """

    page_size: ClassVar[int]
    eviction: ClassVar[str]
    events: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[Lease, list[int], int]] = []

    @initialize(
        num_pages=st.sampled_from([20, 12, 20, 12, 5]), radix=st.sampled_from([True] * 7 + [False])
    )
    def build(self, num_pages: int, radix: bool) -> None:
        self.cache = WatchedCache(
            num_pages, self.page_size, self.events, eviction=self.eviction, radix=radix
        )

    def run_of(self, pages: list[int]) -> list[int]:
        return [t for page in pages for t in [0] * (self.page_size - 1) + [page]]

    @rule(
        pages=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=6),
        tail=st.integers(1, 15),
        namespace=st.sampled_from(NAMESPACES),
        room=st.sampled_from([99, 99, 99, 3, 1, 0]),
        grown=st.sampled_from([99, 99, 3, 2, 0]),
        published=st.booleans(),
        priority=st.sampled_from([0, 0, 1, 5, -3]),
    )
    def open(self, pages, tail, namespace, room, grown, published, priority) -> None:
        self.count()
        tokens = self.run_of(pages) + [1] * (1 + (tail - 1) % self.page_size)
        limit = min(len(tokens) - 1, room * self.page_size)
        lease = self.cache.open(np.array(tokens, np.int32), namespace, limit, priority)
        assert len(lease.pages) * self.page_size <= limit
        self.live.append((lease, tokens, len(tokens)))
        self.grow(lease, tokens, grown, published)

    @precondition(lambda self: self.live)
    @rule(
        which=st.integers(0, 99),
        n=st.integers(0, 8),
        more=st.lists(st.integers(0, 1), max_size=4),
        published=st.booleans(),
    )
    def extend(self, which, n, more, published) -> None:
        """Pages for what the prompt still lacks, or for output that has come meanwhile."""
        self.count()
        lease, tokens, _ = self.live[which % len(self.live)]
        tokens += self.run_of(more)
        self.grow(lease, tokens, n, published)

    def grow(self, lease: Lease, tokens: list[int], most: int, published: bool) -> None:
        n = min(most, -(-len(tokens) // self.page_size) - lease.num_pages)
        pages = self.cache.allocate(n)
        self.events["refused"] += pages is None
        if pages is not None:
            lease.extend(pages)
        if published:
            self.cache.commit(lease, self.valid(lease, tokens))

    def valid(self, lease: Lease, tokens: list[int]) -> np.ndarray:
        return np.array(tokens[: lease.num_pages * self.page_size], np.int32)

    @precondition(lambda self: self.live)
    @rule(
        which=st.integers(0, 99), kept=st.sampled_from([True, True, False]), lost=st.integers(0, 2)
    )
    def end(self, which, kept, lost) -> None:
        """By itself, the last tokens without KV, or for want of pages."""
        self.count()
        lease, tokens, prompt_len = self.live.pop(which % len(self.live))
        if kept:
            valid = self.valid(lease, tokens)
            self.cache.finish(lease, valid[: max(len(valid) - lost, 0)], prompt_len)
        else:
            self.cache.release(lease)

    @rule(luck=st.integers(0, 40))
    def flush_or_reset(self, luck) -> None:
        self.count()
        if luck == 0:
            self.cache.reset()
            self.live.clear()
        elif luck < 10 and not self.live:
            self.cache.reset()
            self.events["flushed"] += 1

    def count(self) -> None:
        self.events["operations"] += 1

    @invariant()
    def equals_the_model(self) -> None:
        self.cache.agree_in_full()

    def teardown(self) -> None:
        for lease, *_ in self.live:
            self.cache.release(lease)
        assert self.cache.available_pages == self.cache.total_pages


def run_machine(
    page_size: int, eviction: str, examples: int, steps: int, number: int = 0
) -> Counter[str]:
    """`number`: of the run, so that each is another one."""
    fields = {"page_size": page_size, "eviction": eviction, "events": Counter()}
    machine = seed(number)(type("Machine", (CacheMachine,), fields))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.events


FIRED = ("hit", "evicted", "refused", "sealed", "extended", "inserted", "flushed")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_cache_equals_a_dict_of_prefixes_after_every_operation(page_size):
    events = Counter[str]()
    for number, eviction in enumerate([*ORDERS] * 2):
        events += run_machine(page_size, eviction, examples=10, steps=30, number=number)
    assert all(events[name] for name in FIRED), events


@pytest.mark.full
@pytest.mark.parametrize("eviction", ORDERS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_cache_equals_a_dict_of_prefixes_after_very_many_operations(page_size, eviction):
    """Together with the other cases of this test: 10⁵ operations."""
    events = Counter[str]()
    for number in range(8):
        events += run_machine(page_size, eviction, examples=30, steps=40, number=100 + number)
    assert all(events[name] for name in FIRED), events
    assert events["operations"] > 100_000 / 15, events
