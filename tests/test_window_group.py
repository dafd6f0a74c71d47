"""The pages of sliding-window layers beside the full ones: CacheManager with a WindowGroup against
a brute-force model that knows what every page of both pools holds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from random_runs import run_rounds

from jserve.cache.integrity import nodes
from jserve.cache.manager import CacheManager, Lease
from jserve.cache.window import WindowGroup
from jserve.runner.window_share import kept_tokens

NAMESPACES = [(None, None), (None, None), ("lora", None)]


def make(
    full: int, window_pages: int, page: int, window: int, kept: int | None = None, **options
) -> tuple[CacheManager, WindowGroup]:
    """Pools of that many pages, trash pages included."""
    kept = kept_tokens(window, page) if kept is None else kept
    group = WindowGroup(window, kept, num_pages=window_pages, full_pages=full, page_size=page)
    return CacheManager(full, page, groups=(group,), **options), group


@dataclasses.dataclass
class Held:
    lease: Lease
    namespace: tuple
    tokens: list[int]
    done: int  # tokens with KV


class Pools:
    """What each page holds: the whole context up to its end."""

    def __init__(self, manager: CacheManager, group: WindowGroup) -> None:
        self.manager, self.group, self.page = manager, group, manager.page_size
        self.full: dict[int, tuple] = {}
        self.window: dict[int, tuple] = {}

    def compute(self, held: Held, end: int) -> None:
        """Tokens up to `end` get KV; what each sees must be there, in both pools."""
        pages, page = held.lease.pages.tolist(), self.page
        self.read(held, held.done)
        for position in range(held.done, end):
            content = (held.namespace, *held.tokens[: position + 1])
            at = pages[position // page]
            beside = int(self.group.of[at])
            assert beside > 0, f"{position=} has no window page"
            self.full[at] = self.window[beside] = content
            held.done = position + 1
        self.read(held, max(held.done - 1, 0))

    def read(self, held: Held, token: int) -> None:
        """What a token at this position sees of earlier ones."""
        pages, page = held.lease.pages.tolist(), self.page
        for i in range(-(-min(token, held.done) // page)):
            context = (held.namespace, *held.tokens[: min((i + 1) * page, held.done)])
            assert self.full[pages[i]] == context, f"{token=} page {i}"
            if (i + 1) * page > token + 1 - self.group.window:
                assert self.window[int(self.group.of[pages[i]])] == context, f"{token=} page {i}"

    def cached(self) -> dict[tuple, int]:
        """What the tree holds: context up to a page's end → page."""
        found, stack = (
            {},
            [(child, (edge[0],)) for edge, child in self.manager.tree.root.children.items()],
        )
        while stack:
            node, context = stack.pop()
            for i, page in enumerate(node.pages.tolist()):
                key = node.key[i * self.page : (i + 1) * self.page].tolist()
                context = (*context, *key)
                found[context] = page
            stack += [(child, context) for child in node.children.values()]
        return found


class WindowMachine(RuleBasedStateMachine):
    page_size, window = 2, 5
    kept: int | None = None
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(full=st.sampled_from([20, 30]), short=st.sampled_from([9, 12, 20]))
    def build(self, full: int, short: int) -> None:
        self.manager, self.group = make(full, short, self.page_size, self.window, self.kept)
        self.pools = Pools(self.manager, self.group)
        self.held: list[Held] = []
        self.before = self.group.slid, self.group.tombstones

    def needed(self, ends: int) -> int:
        """First page that the token after `ends` pages sees, by counting."""
        next_token = ends * self.page_size
        return next(
            i for i in range(ends + 1) if (i + 1) * self.page_size > next_token + 1 - self.window
        )

    @rule(
        pages=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=9),
        tail=st.integers(0, 1),
        namespace=st.sampled_from(NAMESPACES),
    )
    def open(self, pages: list[int], tail: int, namespace: tuple) -> None:
        tokens = [t for p in pages for t in [0] * (self.page_size - 1) + [p]] + [1] * tail
        limit = len(tokens) - 1
        cached, best, longest = self.pools.cached(), 0, 0
        for ends in range(1, limit // self.page_size + 1):
            path = [
                cached.get((namespace, *tokens[: i * self.page_size])) for i in range(1, ends + 1)
            ]
            if None in path:
                break
            longest = ends
            if all(self.group.of[page] for page in path[self.needed(ends) :]):
                best = ends
        lease = self.manager.open(np.array(tokens, np.int32), namespace, limit)
        assert lease.num_pages == best, f"{lease.num_pages=} {best=} {longest=}"
        self.seen["matches"] += best > 0
        self.seen["shortened"] += best < longest
        self.held.append(Held(lease, namespace, tokens, best * self.page_size))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 6), grow=st.integers(0, 9))
    def step(self, which: int, chunk: int, grow: int) -> None:
        """As a plan does: slide all, then pages for one's next tokens, then its KV."""
        self.group.slide(
            [h.lease for h in self.held], np.array([h.done for h in self.held], np.int32)
        )
        held = self.held[which % len(self.held)]
        if held.done == len(held.tokens):
            held.tokens += [0] * grow + [1]
        end = min(held.done + chunk * self.page_size, len(held.tokens))
        n = -(-end // self.page_size) - held.lease.num_pages
        cached, free = self.pools.cached(), self.manager.allocator.num_free
        windows_needed = {
            int(self.group.of[page])
            for h in self.held
            for page in h.lease.pages.tolist()
            if self.group.locks[page]
        }
        room = self.group.num_pages - 1 - len(windows_needed)
        beside = {context: int(self.group.of[page]) for context, page in cached.items()}
        pages = self.manager.allocate(max(n, 0))
        full_room = free + self.evictable(cached)
        assert (pages is None) == (n > min(room, full_room)), f"{n=} {room=} {full_room=}"
        if pages is None:
            self.seen["refused"] += 1
            return
        after = self.pools.cached()
        gone = cached.keys() - after.keys()
        buried = [c for c in after if beside[c] and not self.group.of[after[c]]]
        self.seen["evicted"] += len(gone)
        if len(gone) > max(0, n - free):  # leaves went for their windows
            self.seen["leaves for windows"] += 1
            loose = [c for c in after if self.group.of[after[c]] and not self.group.locks[after[c]]]
            inner = [c for c in loose if self.middle(c, after)]
            assert not inner, f"before full pages go, {inner} could"
        self.seen["buried"] += len(buried)
        held.lease.extend(pages)
        self.pools.compute(held, end)

    def evictable(self, cached: dict[tuple, int]) -> int:
        locked = {p for h in self.held for p in h.lease.pages[: h.lease.num_shared].tolist()}
        return len([page for page in cached.values() if page not in locked])

    def middle(self, context: tuple, cached: dict[tuple, int]) -> bool:
        """No prefix that ends with a node needs this page."""
        page = cached[context]
        for node in nodes(self.manager.tree):
            run = node.pages.tolist()
            if page in run:
                return len(run) - run.index(page) > 1 - (1 - self.window) // self.page_size
        raise AssertionError(f"{page=} is in no node")

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        held = self.held[which % len(self.held)]
        self.manager.commit(held.lease, np.array(held.tokens[: held.done], np.int32))
        self.seen["sealed"] += held.lease.sealed

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), lost=st.integers(0, 2))
    def finish(self, which: int, lost: int) -> None:
        held = self.held.pop(which % len(self.held))
        least = held.lease.num_shared * self.page_size
        valid = max(held.done - lost, least)
        holes = self.tombstones()
        self.manager.finish(held.lease, np.array(held.tokens[:valid], np.int32))
        self.seen["mended"] += len(holes - self.tombstones())

    def tombstones(self) -> set[int]:
        return {p for p in self.pools.cached().values() if not self.group.of[p]}

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.manager.release(self.held.pop(which % len(self.held)).lease)

    @rule()
    def flush(self) -> None:
        if not self.held:
            self.manager.reset()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for context, page in self.pools.cached().items():
            assert self.pools.full[page] == context
            beside = int(self.group.of[page])
            assert not beside or self.pools.window[beside] == context
        for held in self.held:
            self.pools.read(held, held.done)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.seen["slid"] += self.group.slid


MET = ("matches", "evicted", "buried", "slid")


def run_machine(examples: int, steps: int, first_seed: int = 0, **sizes: object) -> Counter[str]:
    seen: Counter[str] = Counter()
    machine = type("Machine", (WindowMachine,), {"seen": seen, **sizes})
    run_rounds(machine, examples, steps, lambda: all(seen[name] for name in MET), 4, first_seed)
    return seen


SIZES = [
    {"page_size": 2, "window": 5, "kept": 8},
    {"page_size": 1, "window": 3, "kept": 4},
    {"page_size": 4, "window": 4, "kept": 8},
    {"page_size": 3, "window": 1, "kept": 1},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_both_pools_hold_what_every_live_token_sees_under_random_operations(sizes: dict) -> None:
    seen = run_machine(100, 40, **sizes)
    for name in MET:
        assert seen[name] > 0, f"{name} never happened: {seen}"


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES)
def test_both_pools_under_very_many_operations(sizes: dict) -> None:
    run_machine(1500, 60, **sizes)


SPACE = (None, None)


def run_of(n: int, salt: int = 0) -> np.ndarray:
    return np.arange(n, dtype=np.int32) + 1000 * salt


def prefill(manager: CacheManager, tokens: np.ndarray, chunk: int) -> tuple[Lease, int]:
    """A request's prompt, computed chunk by chunk; and the most window pages that it held."""
    (group,) = manager.groups
    lease, most = manager.open(tokens, SPACE, len(tokens) - 1), 0
    done = lease.num_pages * manager.page_size
    while done < len(tokens):
        group.slide([lease], np.array([done]))
        end = min(done + chunk, len(tokens))
        pages = manager.allocate(-(-end // manager.page_size) - lease.num_pages)
        assert pages is not None
        lease.extend(pages)
        manager.commit(lease, tokens[:end])
        most = max(most, int(np.count_nonzero(group.locks)))
        done = end
    manager.check_integrity()
    return lease, most


def test_a_long_prompt_and_its_answer_hold_a_window_and_a_chunk() -> None:
    manager, group = make(full=300, window_pages=30, page=4, window=16, kept=22)
    prompt = run_of(600)
    lease, most = prefill(manager, prompt, 32)
    assert most <= -(-22 // 4) + 1 + 32 // 4
    for position in range(600, 700):
        group.slide([lease], np.array([position]))
        if position % 4 == 0:
            pages = manager.allocate(1)
            assert pages is not None
            lease.extend(pages)
        assert np.count_nonzero(group.locks) <= -(-22 // 4) + 1
        manager.check_integrity()
    assert group.slid > 15, "the answer's pages are private, and freed as it goes on"
    assert group.tombstones > 0, "the prompt's are cached, and go when others need room"
    manager.finish(lease, run_of(699))
    manager.check_integrity()
    assert manager.tree.evictable_pages == 699 // 4, "the full pages of both are cached"


def test_the_next_turn_matches_all_of_the_one_before() -> None:
    for length in range(41, 60):  # wherever the last page ends
        manager, group = make(full=300, window_pages=100, page=4, window=16)
        lease, _ = prefill(manager, run_of(40), 16)
        for position in range(40, length + 1):  # one more may be in flight when it ends
            group.slide([lease], np.array([position]))
            if position % 4 == 0:
                pages = manager.allocate(1)
                assert pages is not None
                lease.extend(pages)
        manager.finish(lease, run_of(length))
        again = manager.open(run_of(length + 5), SPACE, length + 4)
        assert again.num_pages == length // 4
        manager.check_integrity()


def test_inner_windows_go_before_the_ends_of_prefixes_and_full_pages_stay() -> None:
    manager, group = make(full=300, window_pages=41, page=1, window=6, kept=8)
    for salt in range(4):
        lease, _ = prefill(manager, run_of(10, salt), 10)
        manager.finish(lease, run_of(10, salt))
    assert manager.tree.evictable_pages == group.evictable == 40
    lease, _ = prefill(manager, run_of(8, 9), 8)
    assert group.tombstones == 8 and manager.counters.evicted_pages == 0
    for salt in range(4):
        assert manager.tree.match(run_of(10, salt), SPACE)[1].size == 10
        found = manager.open(run_of(11, salt), SPACE, 10)
        assert found.num_pages == 10, "a prefix needs only the window before its end"
        manager.release(found)
    shorter = manager.open(run_of(11, 0), SPACE, 8)
    assert shorter.num_pages == 0, "before token 8 the window is no longer whole"
    manager.release(shorter)
    manager.release(lease)
    manager.check_integrity()


def test_a_prompt_that_comes_again_is_cached_although_its_last_page_is_not_matched() -> None:
    manager, group = make(full=300, window_pages=21, page=4, window=8)
    prompt = run_of(40)  # whole pages: the last one is computed again, for its logits
    lease, _ = prefill(manager, prompt, 16)
    manager.finish(lease, prompt)
    lease, _ = prefill(manager, run_of(80, 1), 16)
    manager.finish(lease, run_of(80, 1))
    assert group.tombstones > 0
    assert manager.open(prompt, SPACE, 39).num_pages == 9


def test_when_only_ends_are_left_the_oldest_leaf_goes_with_all_it_has() -> None:
    manager, group = make(full=300, window_pages=21, page=1, window=6, kept=6)
    for salt in range(4):
        lease, _ = prefill(manager, run_of(5, salt), 5)
        manager.finish(lease, run_of(5, salt))
    assert manager.allocator.num_free > 200 and group.allocator.num_free == 0
    lease, _ = prefill(manager, run_of(4, 9), 4)
    assert manager.counters.evicted_pages == 5 and group.tombstones == 0
    assert manager.open(run_of(6, 0), SPACE, 5).num_pages == 0
    assert manager.open(run_of(6, 1), SPACE, 5).num_pages == 5
    manager.check_integrity()


def test_a_second_run_of_the_same_prompt_mends_its_windows() -> None:
    manager, _ = make(full=300, window_pages=21, page=1, window=6, kept=6)
    for tokens in (run_of(20), run_of(12, 1)):
        lease, _ = prefill(manager, tokens, 4)
        manager.finish(lease, tokens)
    lost = manager.open(run_of(13), SPACE, 12)
    assert lost.num_pages < 12, "its middle made room for the other's end"
    manager.release(lost)
    lease, _ = prefill(manager, run_of(13), 4)
    assert lease.sealed
    manager.finish(lease, run_of(13))
    assert manager.open(run_of(13), SPACE, 12).num_pages == 12
    manager.check_integrity()


def test_integrity_checks_find_a_lost_window_page_and_a_lock_without_a_reason() -> None:
    manager, group = make(full=30, window_pages=20, page=2, window=6)
    lease, _ = prefill(manager, run_of(12), 4)
    page = int(lease.pages[-1])
    for array, value, message in (
        (group.of, 0, "without exactly one owner"),
        (group.locks, 2, "locks of"),
    ):
        before, array[page] = int(array[page]), value
        with pytest.raises(AssertionError, match=message):
            manager.check_integrity()
        array[page] = before
    group.evictable += 1
    with pytest.raises(AssertionError, match="evictable"):
        manager.check_integrity()


def test_a_reset_forgets_both_pools() -> None:
    manager, group = make(full=30, window_pages=20, page=2, window=6)
    prefill(manager, run_of(12), 4)
    manager.reset()
    manager.check_integrity()
    assert group.available == 19 and manager.available_pages == 19 and manager.full_pages == 29


def decode(manager: CacheManager, lease: Lease, tokens: np.ndarray, count: int) -> np.ndarray:
    """The tokens and `count` more, each computed behind the last."""
    (group,) = manager.groups
    grown = np.concatenate([tokens, np.full(count, 7, np.int32)])
    for position in range(len(tokens), len(grown)):
        group.slide([lease], np.array([position]))
        pages = manager.allocate(position // manager.page_size + 1 - lease.num_pages)
        assert pages is not None
        lease.extend(pages)
        manager.check_integrity()
    return grown


def sealed_run(manager: CacheManager, shared: int) -> tuple[Lease, np.ndarray, np.ndarray]:
    """A prompt that begins with `shared` tokens that another published meanwhile, answered far past
    its window."""
    (group,) = manager.groups
    prompt = np.concatenate([run_of(shared), run_of(30, 1)])
    lease = manager.open(prompt, SPACE, 0)  # its own prompt's log-probabilities: none is matched
    first, _ = prefill(manager, run_of(shared), 32)
    manager.finish(first, run_of(shared))
    pages = manager.allocate(len(prompt) // manager.page_size)
    assert pages is not None
    lease.extend(pages)
    manager.commit(lease, prompt)
    assert lease.sealed
    answer = decode(manager, lease, prompt, 60)
    assert int(group.locks[lease.pages[: len(prompt) // manager.page_size]].max()) == 0
    return lease, prompt, answer


def test_a_prompt_computed_beside_another_that_begins_alike_is_cached_to_its_end() -> None:
    manager, group = make(full=300, window_pages=200, page=1, window=6, kept=8)
    lease, prompt, answer = sealed_run(manager, 40)
    assert group.available == 199 - 8, "it locks no more than any other"
    manager.finish(lease, answer)
    manager.check_integrity()
    assert manager.open(prompt, SPACE, len(prompt) - 1).num_pages == len(prompt) - 1


def test_what_such_a_request_leaves_behind_goes_before_anything_cached() -> None:
    manager, group = make(full=300, window_pages=131, page=1, window=6, kept=8)
    lease, prompt, answer = sealed_run(manager, 40)
    assert group.slid > len(prompt) - 8 and group.tombstones == 0
    assert manager.counters.evicted_pages == 0
    manager.finish(lease, answer)
    manager.check_integrity()
    found = manager.open(prompt, SPACE, len(prompt) - 1)
    assert found.num_pages == 40, "of what went first only the other's part is left"
    manager.release(found)
    assert manager.open(answer, SPACE, len(answer)).num_pages == len(answer)


@pytest.mark.parametrize("answered", [0, 3, 40])
def test_old_leaves_go_before_the_end_of_the_newest_prompt(answered: int) -> None:
    manager, group = make(full=300, window_pages=41, page=1, window=6, kept=8)
    for salt in range(2, 9):
        lease, _ = prefill(manager, run_of(5, salt), 5)
        manager.finish(lease, run_of(5, salt))
    prompt = np.concatenate([run_of(3, 2), run_of(20, 1)])
    lease, _ = prefill(manager, prompt, 8)
    answer = decode(manager, lease, prompt, answered)
    manager.finish(lease, answer)
    assert manager.counters.evicted_pages > 0 and group.tombstones > 0
    assert manager.open(prompt, SPACE, len(prompt) - 1).num_pages == len(prompt) - 1
    manager.check_integrity()
