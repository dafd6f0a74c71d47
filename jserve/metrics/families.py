"""Names, help texts, buckets and labels of the metrics (SGLang's), as data, and their registry.

Names that end in `_total` are counters; the engine's are cumulative already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E = (*_LATENCY, 600, 1200, 1800, 2400)
_PER_TOKEN = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
_QUEUE = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20),
    *range(30, 101, 10),
    *range(200, 1001, 100),
)
_TOKENS = (
    *(100, 300, 500, 700, 1000, 1500),
    *range(2000, 10_001, 1000),
    *range(12_500, 30_001, 2500),
    *(35_000, 40_000, 60_000, 80_000, 100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000),
)

_COUNTERS = {
    "num_requests_total": "Requests that ended.",
    "num_aborted_requests_total": "Requests that were aborted.",
    "prompt_tokens_total": "Prompt tokens of ended requests.",
    "generation_tokens_total": "Generated tokens.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Request creation to first token.", _LATENCY),
    "inter_token_latency_seconds": ("Time between outputs, per token.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("Creation to finish.", _E2E),
    "queue_time_seconds": ("Arrival to admission.", _QUEUE),
    "tokenize_seconds": ("Prompt text to ids.", _PER_TOKEN),
    "prompt_tokens_histogram": ("Prompt length.", _TOKENS),
    "uncached_prompt_tokens_histogram": ("Prompt tokens computed.", _TOKENS),
    "generation_tokens_histogram": ("Output length.", _TOKENS),
}
#: Counted here, with labels that only this side knows; the engine's own count of them is not shown.
COUNTED_HERE = frozenset((*_COUNTERS, "cached_tokens_total"))


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """The time series of streaming, or of other, requests, by metric name."""

    counters: Mapping[str, prometheus_client.Counter]
    histograms: Mapping[str, prometheus_client.Histogram]


class Families:
    """Every metric of a server in a registry of its own."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        prefix = f"{prefix}:"  # as SGLang's names: sglang:num_running_reqs
        labels = {"model_name": model_name, "engine_type": "unified"}
        self._values = tuple(labels.values())
        names = (*labels, "is_streaming")
        self.engine = EngineValues(prefix, labels)
        self.registry.register(self.engine)
        self._counters = {
            name: prometheus_client.Counter(prefix + name, text, names, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: prometheus_client.Histogram(
                prefix + name, text, names, registry=self.registry, buckets=buckets
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.cached_tokens = prometheus_client.Counter(
            f"{prefix}cached_tokens_total",
            "Prompt tokens that the cache held.",
            (*labels, "cache_source"),
            registry=self.registry,
        ).labels(*self._values, "device")

    def series(self, streaming: bool) -> Series:
        labels = (*self._values, str(streaming))
        return Series(
            {name: metric.labels(*labels) for name, metric in self._counters.items()},
            {name: metric.labels(*labels) for name, metric in self._histograms.items()},
        )


class EngineValues(Collector):
    """The engine's latest Gauges message as metric families."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self.values: dict[str, float] = {}
        self._prefix = prefix
        self._labels = {**labels, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}

    def collect(self) -> Iterator[Metric]:
        for name, value in self.values.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"{self._prefix}{name}", name, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric
