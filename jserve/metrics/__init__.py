"""Metrics of one API process: what is observed here, and the engine's numbers passed on.

Names, labels and buckets are families.py's; how Prometheus reads them is exposition.py's. A request
counts when it ends, by itself, aborted or left; one that was refused never began, and does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from jserve.metrics.boundary import boundaries
from jserve.metrics.exposition import CONTENT_TYPE, Exposition
from jserve.metrics.families import FAMILIES, histograms
from jserve.metrics.histogram import Histogram
from jserve.metrics.meter import Meter
from jserve.metrics.priority import Mark, no_mark, split_series
from jserve.metrics.timing import Timing
from jserve.types import Delta, FinishReason, Gauges, Submit, Times

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """All metrics of a server; methods are safe from any thread.

    `engine`: asked at scrape time for the engine's latest message. `mark`: make_mark's where
    priorities order the queue.
    """

    def __init__(
        self,
        prefix: str = "jserve",
        model_name: str = "",
        engine: Callable[[], Gauges] = lambda: Gauges(values={}),
        mark: Mark = no_mark,
    ) -> None:
        self._mark = mark
        self._histograms = histograms("request")
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        by_priority = mark is not no_mark
        self._exposition = Exposition(
            prefix, model_name, engine, self._counters, self._histograms, by_priority
        )
        timing = Timing(self.observe, self._watch)
        self.meter = Meter(timing, self._first_token, self._tokens, self._finished, self._count)

    def observe(self, series: str, value: float, times: int = 1) -> None:
        with self._lock:
            if series not in self._histograms:  # the first of its priority
                self._histograms[series] = Histogram(FAMILIES[split_series(series)[0]].bounds)
            self._histograms[series].observe(value, times)

    def count(self, series: str, n: int = 1) -> None:
        with self._lock:
            self._counters[series] += n

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

    def _first_token(self, submit: Submit, times: Times) -> None:
        series = f"time_to_first_token_seconds/{_streaming(submit)}{self._mark(submit.priority)}"
        self.observe(series, times.first_token - times.created)

    def _tokens(self, submit: Submit, count: int, seconds: float) -> None:
        """Each is one observation."""
        mark = self._mark(submit.priority)
        self.observe(f"inter_token_latency_seconds{mark}", seconds / count, count)

    def _count(self, series: str, amount: int) -> None:
        with self._lock:
            self._counters[series] += amount

    def _finished(
        self, submit: Submit, why: FinishReason, last: Delta, generated: int, times: Times
    ) -> None:
        aborted = why.type == "abort"
        if aborted and not (last.ended or generated):
            return  # refused
        prompt, cached, label = len(submit.prompt_ids), last.cached_tokens, _streaming(submit)
        counts = {
            f"num_requests_total/{label}": 1,
            f"prompt_tokens_total/{label}": prompt,
            f"generation_tokens_total/{label}": generated,
            "cached_tokens_total/device": cached,
            "num_aborted_requests_total": int(aborted),
        }
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
        mark = self._mark(submit.priority)
        with self._lock:
            self._counters.update({series + mark: count for series, count in counts.items()})
        for series, value in observed.items():
            self.observe(series + mark, value)


def _streaming(submit: Submit) -> str:
    """Whether its client gets tokens as they come."""
    return "true" if submit.stream else "false"
