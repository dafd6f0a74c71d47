"""The masks of a step: which next tokens the grammars of its rows allow.

Asked between the commit of token N and the draw of token N + 1. A row's constraint is brought up to
the tokens that its request has: retraction, resumption and dropped tokens need nothing else. What
fails for a row, be it a library, ends its request and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from jserve.grammar.backend import GrammarError
from jserve.grammar.constraint import Constraint
from jserve.grammar.templates import Templates
from jserve.plan import StepPlan
from jserve.types import FinishReason, Submit

logger = logging.getLogger("jserve.engine")


class Constrained(Protocol):
    """What is known here of a request; the scheduler's Request."""

    submit: Submit
    output_ids: list[int]
    constraint: Constraint | None


class Settings(Protocol):
    """Of the scheduler: the width of a row of logits, and what ends answers."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Scheduling(Protocol):
    """What ends requests and counts; the Scheduler."""

    finish: Callable[[Any, FinishReason], None]
    count: Callable[[str, int], None]

    @property
    def settings(self) -> Settings: ...


class Masks:
    """Called with each plan that was launched. EOS ids may come where a grammar can end.

    Args:
        jump: shown a request that goes on; see jump.py.
    """

    def __init__(
        self,
        templates: Templates,
        scheduler: Scheduling,
        jump: Callable[[Any, Constraint], None] = lambda request, constraint: None,
    ) -> None:
        self._templates, self._jump = templates, jump
        self._end, self._count = scheduler.finish, scheduler.count
        self._words = -(-scheduler.settings.vocab_size // 32)
        self._eos_ids = tuple(scheduler.settings.eos_token_ids)

    def __call__(self, plan: StepPlan) -> np.ndarray | None:
        """int32[rows that sample, words] of allowed tokens; None when all rows are free."""
        rows = cast(tuple[Any, ...], plan.rows)
        sampling = [rows[r] for r in np.flatnonzero(plan.samples)]
        bound = [
            (at, row)
            for at, row in enumerate(sampling)
            if row.request.submit.grammar is not None and row.alive
        ]
        if not bound:
            return None
        masks = np.full((len(sampling), self._words), -1, np.int32)
        for at, row in bound:
            try:
                self._fill(masks[at], row.request)
            except (KeyboardInterrupt, SystemExit):
                raise
            except GrammarError as error:  # a limit
                self._fail(row.request, "limit", str(error))
            except BaseException as error:  # a panic in Rust is no Exception
                if not row.alive:
                    raise  # its stay was ended: that failed, not its grammar
                self._fault(row.request, error)
        self._count("grammar_rows_masked_total", len(bound))
        return masks

    def _fill(self, mask: np.ndarray, request: Constrained) -> None:
        constraint = request.constraint or self._begin(request)
        rejected = constraint.advance(request.output_ids)
        if rejected is not None:
            return self._fail(request, "token", f"the grammar does not allow token {rejected}")
        if constraint.free:
            return forbid(mask, self._eos_ids)
        if constraint.closed:  # and EOS is to be ignored, but nothing may follow
            stop = FinishReason(type="stop", matched=request.output_ids[-1])
            return self._end(request, stop)
        if constraint.matcher.finished:
            mask[:] = 0
            allow(mask, self._eos_ids)
        else:
            constraint.matcher.fill(mask)
        if constraint.opening is not None:
            allow(mask, (constraint.opening,))
        why = self._dead_end(mask, request)
        if why is not None:
            self._fail(request, *why)
        elif constraint.opening is None:
            self._jump(request, constraint)
        return None

    def _dead_end(self, mask: np.ndarray, request: Constrained) -> tuple[str, str] | None:
        """Why nothing can be drawn: a kind of failure and what to say."""
        params, length = request.submit.sampling, len(request.output_ids)
        if not mask.any():
            return "nothing", "no token satisfies the grammar here"
        if length < params.min_new_tokens:
            open_ = mask.copy()
            forbid(open_, (*self._eos_ids, *params.stop_token_ids))
            if not open_.any():
                wanted = f"of min_new_tokens {params.min_new_tokens}"
                return "length", f"the grammar allows no more than {length} tokens, {wanted}"
        return None

    def _begin(self, request: Constrained) -> Constraint:
        grammar = request.submit.grammar
        assert grammar is not None, request
        matcher = self._templates.load(grammar).result().fork()
        request.constraint = Constraint(matcher, self._eos_ids, request.submit.thinking)
        return request.constraint

    def _fault(self, request: Constrained, error: BaseException) -> None:
        logger.error("the grammar of %s failed", request.submit.rid, exc_info=error)
        self._fail(request, "fault", f"its grammar failed: {type(error).__name__}: {error}"[:500])

    def _fail(self, request: Constrained, kind: str, why: str) -> None:
        """The answer cannot go on. It is not repaired: what there is of it is marked incomplete."""
        self._count(f"grammar_failures_total/{kind}", 1)
        message = f"The answer is incomplete: {why}."
        self._end(request, FinishReason(type="abort", message=message))


def allow(mask: np.ndarray, ids: Sequence[int]) -> None:
    """Set the bits of tokens in int32[words]."""
    bits = mask.view(np.uint32)
    for token in ids:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(mask: np.ndarray, ids: Sequence[int]) -> None:
    """Clear them."""
    bits = mask.view(np.uint32)
    for token in ids:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
