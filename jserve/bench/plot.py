"""A picture of a run: distributions of TTFT and ITL, and output tokens over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jserve.bench.samples import Sample
from jserve.errors import ConfigError, JserveError


def load_pyplot() -> Any:
    """matplotlib's pyplot for files, or ConfigError: asked before a run, not after."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'jserve[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plot(pyplot: Any, samples: Sequence[Sample], path: str) -> None:
    """Write a picture, a PNG unless its suffix says otherwise.

    Raises JserveError when it cannot be written.
    """
    good = [sample for sample in samples if not sample.error]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    for axis, name, values in (
        (left, "TTFT (ms)", [sample.ttft for sample in good]),
        (middle, "ITL (ms)", [gap for sample in good for gap in sample.itls]),
    ):
        ms = np.sort(np.array(values or [0.0]) * 1e3)
        axis.plot(ms, np.linspace(0, 100, len(ms)))
        axis.set(xlabel=name, ylabel="percentile", xscale="log" if ms[0] > 0 else "linear")
        axis.grid(True)
    begin = min((sample.start for sample in good), default=0.0)
    at = [sample.first + np.cumsum([0.0, *sample.itls]) - begin for sample in good]
    counts = np.bincount(np.concatenate(at).astype(int)) if at else np.zeros(1)
    right.step(np.arange(len(counts)), counts, where="post")
    right.set(xlabel="seconds", ylabel="output tokens/s")
    right.grid(True)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a suffix that is no picture's
        raise JserveError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
