"""The masks of a step: which next tokens the grammars of its rows allow.

Asked between the commit of token N and the draw of token N + 1. A row's matcher is brought up to
the tokens that its request has: retraction, resumption and dropped tokens need nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jserve.grammar.backend import Matcher
from jserve.plan import StepPlan


@dataclasses.dataclass(slots=True)
class Constraint:
    """A request's matcher, and how many of its output tokens that has seen."""

    matcher: Matcher
    num_accepted: int = 0

    def advance(self, output_ids: Sequence[int]) -> int | None:
        """Bring the matcher up to `output_ids`; → a token that it rejects, None if it takes all."""
        while self.num_accepted < len(output_ids):
            token = output_ids[self.num_accepted]
            if not self.matcher.accept(token):
                return token
            self.num_accepted += 1
        return None


class Constrained(Protocol):
    """What a row of a plan tells here; the scheduler's Row."""

    @property
    def constraint(self) -> Constraint | None: ...
    @property
    def output_ids(self) -> Sequence[int]: ...


class Masks:
    """Called with each plan that was launched.

    Args:
        words: int32 words in a row.
        reject: told of a row whose answer cannot go on, with the reason; it ends that request.
    """

    def __init__(self, words: int, reject: Callable[[Constrained, str], None]) -> None:
        self._words = words
        self._reject = reject
        self.rows_masked = 0

    def __call__(self, plan: StepPlan) -> np.ndarray | None:
        """int32[rows that sample, words] of allowed tokens; None when all rows are free."""
        rows: Sequence[Constrained] = plan.rows  # type: ignore[assignment]
        sampling = np.flatnonzero(plan.samples).tolist()
        bound = [(at, rows[r]) for at, r in enumerate(sampling) if rows[r].constraint is not None]
        if not bound:
            return None
        masks = np.full((len(sampling), self._words), -1, np.int32)
        for at, row in bound:
            assert row.constraint is not None
            self._fill(masks[at], row, row.constraint)
        self.rows_masked += len(bound)
        return masks

    def _fill(self, mask: np.ndarray, row: Constrained, constraint: Constraint) -> None:
        rejected = constraint.advance(row.output_ids)
        if rejected is not None:
            self._reject(row, f"the grammar does not allow token {rejected}")
        elif not constraint.matcher.finished:
            constraint.matcher.fill(mask)
            if not mask.any():
                mask[:] = -1
                self._reject(row, "no token satisfies the grammar here")
