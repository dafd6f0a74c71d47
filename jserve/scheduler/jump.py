"""Tokens that can only come next, appended at once: one ragged step computes them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jserve.cache.manager import CacheManager
from jserve.scheduler.interruption import wait_again
from jserve.scheduler.request import Request
from jserve.scheduler.roster import Roster

#: request, token, its log-probabilities, where among them: as Scheduler takes a drawn token in
Accept = Callable[[Request, int, Any, int], None]


def append_forced(
    roster: Roster, cache: CacheManager, accept: Accept, request: Request, tokens: Sequence[int]
) -> None:
    """Give a running request these output tokens. What is in flight for it is dropped; it waits at
    its old place, its KV stays cached, and its next step computes the tokens like a prompt's. It
    is still running, by --req-running-timeout and for the queue's limit.
    """
    row = request.row
    assert row is not None and request.logprobs is None, request.rid
    valid = len(request.prompt) + len(request.output_ids) - 1
    for token in tokens:
        accept(request, token, None, 0)
        if request.row is None:
            return  # it has ended
    request.num_forced += len(tokens) + 1  # the step computes them, and draws one
    roster.totals["num_jump_forward_tokens_total"] += len(tokens)
    cache.finish(row.lease, request.tokens()[:valid], len(request.prompt))
    request.ran += roster.clock() - request.since
    wait_again(roster, row)
