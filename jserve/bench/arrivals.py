"""When the conversations of a benchmark begin: offsets in seconds from its start."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(n: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """float64[n], ascending, the first 0.

    Args:
        rate: mean arrivals a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps. 1: exponential, a Poisson process;
            below: bursts; above: evener.
    """
    if math.isinf(rate):
        return np.zeros(n)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), n)
    return np.cumsum(gaps) - gaps[:1]
