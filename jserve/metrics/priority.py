"""The label of a request's priority, which is part of the names of series where priorities order
the queue: `family/value#priority`. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Callable

#: Clients choose priorities, and every value is a series for ever: later ones share one.
MOST_VALUES = 32
OTHERS = "other"

#: A request's priority → what its series' names end with.
Mark = Callable[[int | None], str]


def no_mark(priority: int | None) -> str:
    """Priorities order nothing: there is no label."""
    return ""


def make_mark(default: int | None = None) -> Mark:
    """`default`: of requests without a priority; None: they have no mark."""
    known: set[str] = set()

    def mark(priority: int | None) -> str:
        value = default if priority is None else priority
        if value is None:
            return ""
        text = str(value)
        if text not in known and len(known) >= MOST_VALUES:
            return f"#{OTHERS}"
        known.add(text)
        return f"#{text}"

    return mark


def split_series(series: str) -> tuple[str, str, str]:
    """(family, value of its extra label or "", priority or "")."""
    name, _, priority = series.partition("#")
    family, _, value = name.partition("/")
    return family, value, priority
