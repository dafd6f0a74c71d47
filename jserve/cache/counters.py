"""What a cache has counted since its start: a record that telemetry reads. Counts nothing itself.

What is true of one moment is asked elsewhere: `len(manager.leases)` live references,
`tree.evictable_pages`, `tree.protected_pages`, `allocator.num_free`.
"""

from __future__ import annotations

import dataclasses

from jserve.metrics.timing import UNTIMED, Timing

#: A match of n tokens is counted at index n.bit_length(): 0, 1, 2–3, 4–7, … tokens.
NUM_LENGTHS = 33


@dataclasses.dataclass(slots=True)
class CacheCounters:
    """Plain numbers, set by the manager and its evictor; they survive a reset of the cache."""

    matched_tokens: int = 0  # by all `open` calls, those for requests that found no room included
    match_lengths: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_LENGTHS)
    allocator_failures: int = 0  # pages were wanted that could not be had
    evicted_pages: int = 0
    timing: Timing = UNTIMED  # told how long things take
