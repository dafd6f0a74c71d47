"""From samples to the figures of a benchmark, under the names of SGLang's result files.

Times are in milliseconds where the name ends in _ms, throughputs a second. `goodput` is ours:
requests a second that kept every limit of an SLO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jserve.bench.samples import Sample
from jserve.errors import ConfigError

_PERCENTILES = (90, 95, 99)
#: What an SLO may limit, in milliseconds.
_LIMITS = {
    "ttft": lambda sample: sample.ttft,
    "tpot": lambda sample: sample.tpot or 0.0,
    "e2e": lambda sample: sample.latency,
    "itl": lambda sample: max(sample.itls, default=0.0),
}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """{"ttft": 200.0} of ["ttft:200"]. Raises ConfigError."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            raise ConfigError(f"--goodput wants NAME:MILLISECONDS, got {pair}") from None
        if name not in _LIMITS:
            raise ConfigError(f"--goodput knows {', '.join(_LIMITS)}, got {name}")
    return limits


def summarize(
    samples: Sequence[Sample], seconds: float, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Figures of what ended well; `failed` counts the rest, with one of each message."""
    good = [sample for sample in samples if not sample.error]
    bad = [sample.error for sample in samples if sample.error]
    inputs = sum(sample.prompt_len for sample in good)
    outputs = sum(sample.output_len for sample in good)
    latencies = [sample.latency for sample in good]
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(bad),
        "error_messages": sorted(set(bad))[:5],
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
        **_spread("e2e_latency", latencies),
        **_spread("ttft", [sample.ttft for sample in good]),
        **_spread("tpot", [t for sample in good if (t := sample.tpot) is not None]),
        **_spread("itl", [gap for sample in good for gap in sample.itls]),
        "concurrency": sum(latencies) / seconds,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "cache_report": _cache_report(good),
    }
    if goodput:
        kept = sum(
            all(_LIMITS[name](sample) * 1e3 <= most for name, most in goodput.items())
            for sample in good
        )
        result |= {"goodput_slo_ms": dict(goodput), "goodput": kept / seconds}
    return result


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """{mean,median,std,p90,p95,p99}_<name>_ms; 0 when there is no value."""
    ms = np.array(values or [0.0]) * 1e3
    figures = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    figures |= {f"p{p}": np.percentile(ms, p) for p in _PERCENTILES}
    return {f"{key}_{name}_ms": float(value) for key, value in figures.items()}


def _cache_report(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Of the requests whose server told; None when none did."""
    told = [(s.cached_tokens, s.prompt_len) for s in samples if s.cached_tokens is not None]
    if not told:
        return None
    cached = sum(tokens for tokens, _ in told)
    rate = cached / max(sum(length for _, length in told), 1)
    return {"cached_tokens": cached, "cache_hit_rate": rate}


def _peaks(samples: Sequence[Sample]) -> tuple[float, int]:
    """Most output tokens in one second, most requests at a time."""
    if not samples:
        return 0.0, 0
    begin = min(sample.start for sample in samples)
    at = np.concatenate([sample.first + np.cumsum([0.0, *sample.itls]) for sample in samples])
    tokens = int(np.bincount((at - begin).astype(int).clip(0)).max())
    moments = sorted([(s.start, 1) for s in samples] + [(s.last, -1) for s in samples])
    return float(tokens), int(np.cumsum([step for _, step in moments]).max())
