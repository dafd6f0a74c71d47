"""Metrics of one API process: what is observed here, and the engine's numbers passed on.

Names, labels and buckets are families.py's; how Prometheus reads them is exposition.py's.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from jserve.metrics.boundary import boundaries
from jserve.metrics.exposition import CONTENT_TYPE, Exposition
from jserve.metrics.families import histograms
from jserve.metrics.meter import Meter
from jserve.metrics.timing import Timing
from jserve.types import Delta, Gauges, Times

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """All metrics of a server; methods are safe from any thread.

    `engine`: asked at scrape time for the engine's latest message.
    """

    def __init__(
        self,
        prefix: str = "jserve",
        model_name: str = "",
        engine: Callable[[], Gauges] = lambda: Gauges(values={}),
    ) -> None:
        self._histograms = histograms("request")
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._exposition = Exposition(prefix, model_name, engine, self._counters, self._histograms)
        timing = Timing(self.observe, self._watch)
        self.meter = Meter(timing, self._first_token, self._tokens, self._finished, self._aborted)

    def observe(self, series: str, value: float, times: int = 1) -> None:
        with self._lock:
            self._histograms[series].observe(value, times)

    def render(self) -> bytes:
        """The exposition text of GET /metrics, of type CONTENT_TYPE."""
        return self._exposition.render()

    def _watch(self, series: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **options)
            self.observe(series, time.perf_counter() - started)
            return result

        return watched

    # What the meter does.

    def _first_token(self, streaming: bool, times: Times) -> None:
        series = f"time_to_first_token_seconds/{_label(streaming)}"
        self.observe(series, times.first_token - times.created)

    def _tokens(self, count: int, seconds: float) -> None:
        """Each is one observation."""
        self.observe("inter_token_latency_seconds", seconds / count, count)

    def _finished(self, streaming: bool, last: Delta, generated: int, times: Times) -> None:
        prompt, cached, label = last.prompt_tokens, last.cached_tokens, _label(streaming)
        counts = {"num_requests": 1, "prompt_tokens": prompt, "generation_tokens": generated}
        with self._lock:
            self._counters.update({f"{n}_total/{label}": count for n, count in counts.items()})
            self._counters["cached_tokens_total/device"] += cached
        observed = {
            "prompt_tokens_histogram": prompt,
            "uncached_prompt_tokens_histogram": prompt - cached,
            "generation_tokens_histogram": generated,
            f"e2e_request_latency_seconds/{label}": times.latest - times.created,
        }
        if generated > 1:
            seconds = (times.latest - times.first_token) / (generated - 1)
            observed[f"request_time_per_output_token_seconds/{label}"] = seconds
        for boundary, seconds in boundaries(times).items():
            observed[f"request_boundary_seconds/{boundary}"] = seconds
        for series, value in observed.items():
            self.observe(series, value)

    def _aborted(self) -> None:
        with self._lock:
            self._counters["num_aborted_requests_total"] += 1


def _label(streaming: bool) -> str:
    return "true" if streaming else "false"
