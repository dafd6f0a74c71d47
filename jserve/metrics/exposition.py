"""The metrics as Prometheus reads them. Knows families and labels, not how anything was counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jserve.metrics.families import ALIASES, FAMILIES, OTHERS, Family
from jserve.metrics.histogram import Histogram, numbers
from jserve.metrics.priority import split_series
from jserve.types import Gauges

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_RANKS = {"tp_rank": "0", "pp_rank": "0"}
_UNKNOWN = Family("scheduler", "")
_OTHERS = {name: Family("scheduler", about) for name, about in OTHERS.items()}
_OF_RANKS = ("scheduler", "cache")  # whose metrics each data-parallel rank has
_OF_ALL = ("num_dp_ranks",)  # … but not these
_T = TypeVar("_T")

Values = Mapping[str, float]
Counts = Mapping[str, list[float]]  # of histogram.numbers


class Exposition(Collector):
    """Shows `counters` and `histograms`, of what this process observes, and the `engine`'s latest
    numbers, all by series; those of FAMILIES that nobody has are zero. `by_priority`: requests and
    the scheduler have a label for it, empty where a number is of all."""

    def __init__(
        self,
        prefix: str,
        model_name: str,
        engine: Callable[[], Gauges],
        counters: Mapping[str, float],
        histograms: Mapping[str, Histogram],
        by_priority: bool = False,
    ) -> None:
        self._engine = engine
        self._prefix = f"{prefix}:"  # as SGLang's names: sglang:num_running_reqs
        request = {"model_name": model_name, "engine_type": "unified"}
        request |= {"priority": ""} if by_priority else {}
        self._labels: dict[str, dict[str, str]] = {
            "request": request,
            "scheduler": request | _RANKS | {"moe_ep_rank": "0"},
            "cache": {"cache_type": "RadixCache"} | _RANKS | {"dp_rank": "0"},
            "http": {},
        }
        self._counters = counters
        self._histograms = histograms
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition text, of type CONTENT_TYPE."""
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        values = {**_with_aliases(engine.values), **self._counters}
        counts = _with_aliases(engine.histograms) | numbers(dict(self._histograms))
        given: dict[str, list[str]] = {name: [] for name in FAMILIES}
        for series in itertools.chain(values, counts):
            given.setdefault(split_series(series)[0], []).append(series)
        ranks = {
            str(rank): (_with_aliases(one.values), _with_aliases(one.histograms))
            for rank, one in engine.ranks.items()
        }
        for name, more in given.items():
            family = FAMILIES.get(name) or _OTHERS.get(name, _UNKNOWN)
            series = list(dict.fromkeys((*family.series(name), *more)))
            shown = {"": (values, counts)}
            if ranks and family.source in _OF_RANKS and name not in _OF_ALL:
                shown = ranks
            yield self._metric(name, family, series, shown, bool(ranks))

    def _metric(
        self,
        name: str,
        family: Family,
        series: list[str],
        shown: Mapping[str, tuple[Values, Counts]],
        several: bool,
    ) -> Metric:
        """With a sample of each rank that is `shown` and has it; where there are `several` ranks
        they are told apart by a label."""
        everybodys = frozenset(family.series(name))
        labels, text = self._labels[family.source], family.about or name
        if several and family.source in _OF_RANKS:
            labels = labels | {"dp_rank": ""}
        label_names = (*labels, *family.label[0].split())
        samples = [
            (_label_values(labels | {"dp_rank": rank} if rank else labels, one), *numbers, one)
            for rank, numbers in shown.items()
            for one in series
            if one in everybodys or any(one in some for some in numbers)
        ]
        if family.bounds:
            metric = HistogramMetricFamily(self._prefix + name, text, labels=label_names)
            bounds = [*map(floatToGoString, family.bounds), "+Inf"]
            for own, _, counts, one in samples:
                *numbers, total = counts.get(one, [0.0] * (len(bounds) + 1))
                buckets = list(zip(bounds, itertools.accumulate(numbers), strict=True))
                metric.add_metric(own, buckets, total)
            return metric
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(self._prefix + name, text, labels=label_names)
        for own, values, _, one in samples:
            metric.add_metric(own, values.get(one, 0.0))
        return metric


def _label_values(labels: dict[str, str], series: str) -> list[str]:
    _, value, priority = split_series(series)
    own = labels | {"priority": priority} if priority else labels
    return [*own.values(), *value.split()]


def _with_aliases(of_engine: Mapping[str, _T]) -> dict[str, _T]:
    """An engine's series and what they stand for, without those that are this process's to count:
    it knows their labels."""
    aliases = {name: of_engine[source] for name, source in ALIASES.items() if source in of_engine}
    own = {n: v for n, v in of_engine.items() if FAMILIES.get(n, _UNKNOWN).source != "request"}
    return own | aliases
