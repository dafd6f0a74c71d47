"""In which order waiting requests are offered to admission: one function a policy, chosen by name
at construction.

A policy reads the queue (in order of arrival) and the cache, changes neither, and decides nothing
about room.
"""

from __future__ import annotations

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
    """Depth first through the tree, into the subtree with the most waiting requests first."""
    at: defaultdict[Node, list[Request]] = defaultdict(list)
    weights: Counter[Node] = Counter()
    for request in waiting:
        node, *_ = cache.tree.find(cache.tree.root, request.tokens(), request.namespace)
        at[node].append(request)
        step: Node | None = node
        while step is not None:
            weights[step] += 1
            step = step.parent
    order: list[Request] = []
    stack = [cache.tree.root]
    while stack:
        node = stack.pop()
        order += at.get(node, [])
        stack += sorted(
            (n for n in node.children.values() if n in weights), key=weights.__getitem__
        )
    return order


def _longest_output(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    return sorted(waiting, key=lambda request: -request.limit)


def _random(
    waiting: Sequence[Request], cache: CacheManager, rng: np.random.Generator
) -> list[Request]:
    return [waiting[i] for i in rng.permutation(len(waiting))]


POLICIES: dict[str, Policy | None] = {
    "fcfs": None,  # the queue as it is
    "lpm": _longest_prefix,
    "dfs-weight": _dfs_weight,
    "lof": _longest_output,
    "random": _random,
}
