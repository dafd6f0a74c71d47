"""Where a sequence's time went: prompt, cache, execution, output."""

from __future__ import annotations

from jserve.types import Times


def boundaries(times: Times) -> dict[str, float]:
    """Seconds of a sequence that has ended, by boundary: the four sum to its latency."""
    return {
        "prompt": times.sent - times.created,
        "cache": times.cache,
        "execution": times.ended - times.sent - times.cache,
        "output": times.latest - times.ended,
    }
