"""Prometheus metrics of one API process: latencies observed here, the engine's values passed on.

Names, labels and buckets are those of families.py.
"""

from __future__ import annotations

import prometheus_client

from jserve.metrics.families import COUNTED_HERE, Families
from jserve.types import Delta, Gauges, Times

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Metrics:
    """All metrics of a server; methods are safe from any thread and cheap (2 µs an observation)."""

    def __init__(self, prefix: str = "jserve", model_name: str = "") -> None:
        self._families = Families(prefix, model_name)
        self._series = {streaming: self._families.series(streaming) for streaming in (False, True)}
        self.gauges: dict[str, float] = {}  # the engine's latest values

    def tokenized(self, streaming: bool, seconds: float) -> None:
        self._series[streaming].histograms["tokenize_seconds"].observe(seconds)

    def first_token(self, streaming: bool, times: Times) -> None:
        histograms, seconds = self._series[streaming].histograms, times.first_token - times.created
        histograms["time_to_first_token_seconds"].observe(seconds)
        histograms["queue_time_seconds"].observe(times.queued)

    def tokens(self, streaming: bool, count: int, seconds: float) -> None:
        """`count` ≥ 1 tokens, `seconds` after the previous output; each is one observation."""
        latency = self._series[streaming].histograms["inter_token_latency_seconds"]
        for _ in range(count):
            latency.observe(seconds / count)

    def finished(self, streaming: bool, last: Delta, generated: int, times: Times) -> None:
        """One sequence of `generated` tokens ended by itself, with the Delta `last`."""
        series = self._series[streaming]
        series.counters["num_requests_total"].inc()
        series.counters["prompt_tokens_total"].inc(last.prompt_tokens)
        series.counters["generation_tokens_total"].inc(generated)
        self._families.cached_tokens.inc(last.cached_tokens)
        observed = {
            "prompt_tokens_histogram": last.prompt_tokens,
            "uncached_prompt_tokens_histogram": last.prompt_tokens - last.cached_tokens,
            "generation_tokens_histogram": generated,
            "e2e_request_latency_seconds": times.latest - times.created,
        }
        if generated > 1:
            decoding = times.latest - times.first_token
            observed["request_time_per_output_token_seconds"] = decoding / (generated - 1)
        for name, value in observed.items():
            series.histograms[name].observe(value)

    def aborted(self, streaming: bool) -> None:
        self._series[streaming].counters["num_aborted_requests_total"].inc()

    def engine(self, message: Gauges) -> None:
        """Replace the engine's gauges and counters; they are read at scrape time."""
        self.gauges = values = message.values
        self._families.engine.values = {n: v for n, v in values.items() if n not in COUNTED_HERE}

    def render(self) -> bytes:
        """The exposition text of GET /metrics, of type CONTENT_TYPE."""
        return prometheus_client.generate_latest(self._families.registry)
