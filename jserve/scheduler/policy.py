"""In which order waiting requests are offered to admission: one function a policy, chosen by name
at construction.

A policy reads the queue (by rank, then in order of arrival) and the cache, changes neither, and
decides nothing about room. Ranks, i.e. priorities, go with fcfs and lof only.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.cache.radix import Node, RadixTree
from jserve.scheduler.request import Request

Policy = Callable[[Sequence[Request], CacheManager, np.random.Generator], list[Request]]

#: Beyond this many waiting requests the order by matched prefix costs more than it saves.
MAX_MATCHED_QUEUE = 128
#: Tokens: with less than this cached, look for a waiting sibling; with at least this shared, let
#: the sibling go first.
SIBLING_PREFIX = 32
#: What is cached orders only requests that fewer than so many later arrivals have overtaken.
MAX_OVERTAKEN = 256


def _longest_prefix(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    """Longest cached prefix first; a request whose prefix a waiting sibling is about to compute
    comes last this time.
    """
    if not cache.radix or len(waiting) > MAX_MATCHED_QUEUE:
        return list(waiting)
    queued = RadixTree(cache.page_size)
    keys: dict[str, tuple[bool, int]] = {}
    for request in waiting:
        tokens = request.tokens()
        reusable = tokens[: request.max_match]
        matched = cache.tree.find(cache.tree.root, reusable, request.namespace)[1] * cache.page_size
        later = False
        if matched <= SIBLING_PREFIX:
            shared = queued.find(queued.root, tokens, request.namespace)[1]
            later = shared * cache.page_size >= SIBLING_PREFIX
            if not later:
                pages = len(tokens) // cache.page_size
                run = tokens[: pages * cache.page_size]
                queued.insert(queued.root, run, np.zeros(pages, np.int32), request.namespace)
        keys[request.rid] = later, -matched
    return sorted(waiting, key=lambda request: keys[request.rid])


def _dfs_weight(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    """Depth first through the tree, into the subtree with the most waiting requests first; whoever
    ends at a node comes after those who end below it, so what nobody has cached comes last.
    """
    at: defaultdict[Node, list[Request]] = defaultdict(list)
    weights: Counter[Node] = Counter()
    for request in waiting:
        node, *_ = cache.tree.find(cache.tree.root, request.tokens(), request.namespace)
        at[node].append(request)
        step: Node | None = node
        while step is not None:
            weights[step] += 1
            step = step.parent
    groups: list[list[Request]] = []  # the last first
    stack = [cache.tree.root]
    while stack:
        node = stack.pop()
        groups.append(at.get(node, []))
        below = [child for child in node.children.values() if child in weights]
        stack += sorted(below, key=lambda child: -weights[child])
    return [request for group in reversed(groups) for request in group]


def _longest_output(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    return sorted(waiting, key=lambda request: (request.rank, -request.limit))


def _random(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    return [waiting[i] for i in rng.permutation(len(waiting))]


def _bounded(policy: Policy) -> Policy:
    """`policy`, but whoever MAX_OVERTAKEN later arrivals could have overtaken comes first, in order
    of arrival: else a stream of better matches would starve it.
    """

    def order(
        waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
    ) -> list[Request]:
        oldest = waiting[-1].order - MAX_OVERTAKEN
        aged = bisect.bisect(waiting, oldest, key=lambda request: request.order)
        return [*waiting[:aged], *policy(waiting[aged:], cache, rng)]

    return order


POLICIES: dict[str, Policy | None] = {
    "fcfs": None,  # the queue as it is
    "lpm": _bounded(_longest_prefix),
    "dfs-weight": _bounded(_dfs_weight),
    "lof": _longest_output,
    "random": _random,
}
