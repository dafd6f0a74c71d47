"""What a program did, step by step: what its calls reused and computed, and where it branched.

Pure data for pictures and totals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jserve.lang.backends.base import Usage
from jserve.lang.site import Site


@dataclasses.dataclass(slots=True)
class Step:
    """`kind`: text, role, gen, select, commit, fork, join, variable, argument, or end (a trace that
    could not go on). A role without a name is the end of the open one. `text` is what was added,
    `detail` constraints and choices in words. A step of a run that is not over has no usage yet.
    `branches` belong to a fork."""

    kind: str
    site: Site
    name: str | None = None
    text: str = ""
    detail: str = ""
    usage: Usage | None = None
    seconds: float = 0.0
    branches: Sequence[Sequence[Step]] = ()


def all_steps(steps: Sequence[Step]) -> Iterator[Step]:
    """Those of branches too."""
    for step in list(steps):
        yield step
        for branch in step.branches:
            yield from all_steps(branch)


def total_usage(steps: Sequence[Step]) -> Usage:
    used = [step.usage for step in all_steps(steps) if step.usage is not None]
    return sum(used, Usage())
