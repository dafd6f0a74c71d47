"""Prompt log-probabilities of a step: which of its tokens score the prompt token after them, and
whose the answers are. Steps without such a request never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jserve.plan import Score, ScoreOutcome, StepPlan
from jserve.scheduler.request import Request, Row
from jserve.scheduler.rows import Chunk
from jserve.types import FinishReason


def plan_scores(num_decode: int, chunks: Sequence[Chunk]) -> Score | None:
    """What to ask of a step with these chunks; None when no token of them scores another."""
    tokens, targets, slots, want_top = [], [], [], False
    at = num_decode
    for chunk in chunks:
        row, begin = chunk.row, chunk.grant.begin
        first, last = _span(row, begin, chunk.grant.end)
        logprobs = row.request.logprobs
        if first < last and logprobs is not None:
            tokens.append(np.arange(at + first - begin, at + last - begin, dtype=np.int32))
            targets.append(row.tokens[first + 1 : last + 1])
            slots.append(np.full(last - first, row.slot, np.int32))
            want_top |= logprobs.wants_top
        at += chunk.grant.end - begin
    if not tokens:
        return None
    return Score(np.concatenate(tokens), np.concatenate(targets), np.concatenate(slots), want_top)


class End(Protocol):
    """As Roster.end."""

    def __call__(self, request: Request, finish: FinishReason, *, keep: bool) -> None: ...


def keep_scores(rows: Sequence[Row], plan: StepPlan, score: ScoreOutcome, end: End) -> None:
    """Hand each prompt row its part of the answer, in the order of plan_scores. A request with NaN
    among them ends."""
    at = 0
    for r in range(plan.num_decode_rows, len(rows)):
        row, kv_len = rows[r], int(plan.kv_lens[r])
        first, last = _span(row, kv_len - int(plan.q_lens[r]), kv_len)
        part = slice(at, at + last - first)
        at = part.stop
        if not row.alive or first == last or row.request.logprobs is None:
            continue
        if np.isnan(score.values[part]).any():
            end(row.request, FinishReason(type="stop", matched="NaN happened"), keep=False)
        else:
            row.request.logprobs.add_scores(
                ScoreOutcome(
                    values=score.values[part],
                    top_values=None if score.top_values is None else score.top_values[part],
                    top_ids=None if score.top_ids is None else score.top_ids[part],
                    id_values=None if score.id_values is None else score.id_values[part],
                )
            )


def _span(row: Row, begin: int, end: int) -> tuple[int, int]:
    """Of the tokens [begin, end), those whose hidden state scores the next prompt token."""
    start = row.request.score_from  # the same for all of a stay: it ends with the last chunk
    if start is None:
        return begin, begin
    first = max(begin, start - 1)
    return first, max(first, min(end, len(row.request.prompt) - 1))
