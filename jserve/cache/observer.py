"""Who is told when pages enter and leave the tree: the seam between the cache and KV events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Observer:
    """Called on the engine's thread, in the order in which things happen. The arrays stay as they
    are for good, so they may be kept."""

    #: The last page before a run (an array of one; empty: it starts a prompt), the run's tokens,
    #: its pages, its namespace (extra key, cache salt).
    stored: Callable[[np.ndarray, np.ndarray, np.ndarray, tuple[str | None, str | None]], None]
    removed: Callable[[np.ndarray], None]  # pages that were evicted
    cleared: Callable[[], None]  # all are gone
    num_pages: Callable[[], int | None]  # stored and not removed; None: nobody counts


NO_OBSERVER = Observer(
    stored=lambda parent, tokens, pages, namespace: None,
    removed=lambda pages: None,
    cleared=lambda: None,
    num_pages=lambda: None,
)
