"""The frequencies of a rotary embedding under each way of stretching its context, as constants of a
model.

Sources: YaRN (arXiv 2309.00071) §3.2–3.4; Llama 3.1's scaling by frequency band.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from jserve.types import RopeConfig


def frequencies_of(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians a position for each of head_dim / 2 pairs, and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.scaling is None:
        return base, 1.0
    frequencies, factor = _SCALINGS[rope.scaling](base, rope.theta, dict(rope.params))
    return frequencies.astype(np.float32), factor


def _linear(
    base: np.ndarray, theta: float, params: Mapping[str, float]
) -> tuple[np.ndarray, float]:
    return base / np.float32(params["factor"]), 1.0


def _llama3(
    base: np.ndarray, theta: float, params: Mapping[str, float]
) -> tuple[np.ndarray, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    turns = params["original_max_position_embeddings"] * base / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1.0 - kept) / params["factor"]), 1.0


def _yarn(base: np.ndarray, theta: float, params: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """Pairs that turn more than beta_fast times over the original context are kept, fewer than
    beta_slow divided.
    """
    factor, original = params["factor"], params["original_max_position_embeddings"]
    pairs = len(base)

    def pair_with(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = pair_with(params.get("beta_fast") or 32.0)
    high = pair_with(params.get("beta_slow") or 1.0)
    if params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    span = (high - low) or 0.001
    divided = np.clip((np.arange(pairs, dtype=np.float32) - low) / span, 0.0, 1.0)
    return base * (1.0 - divided) + base / factor * divided, _yarn_attention_factor(factor, params)


def yarn_growth(factor: float, scale: float) -> float:
    """What YaRN multiplies attention's inputs by when a context grows by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_attention_factor(factor: float, params: Mapping[str, float]) -> float:
    if "attention_factor" in params:
        return params["attention_factor"]
    if params.get("mscale") and params.get("mscale_all_dim"):
        return yarn_growth(factor, params["mscale"]) / yarn_growth(factor, params["mscale_all_dim"])
    return yarn_growth(factor, 1.0)


_SCALINGS: Mapping[
    str, Callable[[np.ndarray, float, Mapping[str, float]], tuple[np.ndarray, float]]
] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}

#: Names that RopeConfig.scaling may hold besides None.
SCALINGS = tuple(_SCALINGS)
