"""What comes between a request and its last token: an abort, want of pages, a failed launch. Moves
requests through the roster; a plain request that ends by itself never comes here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.errors import JserveError
from jserve.scheduler.request import Request, Row
from jserve.scheduler.roster import Roster
from jserve.types import Abort, FinishReason

#: Decode steps for which a retraction makes room, per remaining request: it evicts so many tokens,
#: and sets the new-token ratio anew for them.
RETRACT_STEPS = 20

_OUT_OF_MEMORY = "The KV cache is out of memory for the last request."

#: Who stays longest when pages run out, by --retraction-policy: the greatest goes first.
RETRACTION_ORDERS: dict[str, Callable[[Row], tuple[int, ...]]] = {
    "length": lambda row: (-len(row.request.output_ids), len(row.request.prompt)),
    "priority": lambda row: (
        row.request.rank,
        -len(row.request.output_ids),
        len(row.request.prompt),
    ),
}


def abort_requests(roster: Roster, abort: Abort) -> None:
    """End the requests that `abort` names, wherever they are."""
    requests = roster.requests
    if abort.abort_all:
        victims = list(requests.values())
    elif abort.exact:
        victims = [requests[abort.rid]] if abort.rid in requests else []
    else:
        victims = [r for rid, r in requests.items() if abort.rid and rid.startswith(abort.rid)]
    for request in victims:
        if abort.stopped:
            roster.end(request, None)
        else:
            roster.totals["num_aborted_requests_total"] += 1
            roster.end(request, FinishReason(type="abort", message="The request was aborted."))


def make_room(
    roster: Roster, cache: CacheManager, ratio: float
) -> tuple[tuple[Row, ...], np.ndarray, float]:
    """Retract until the pages for the next decode step are there.

    → the rows that are left to run, their slots, and the new-token ratio to go on with.
    """
    table = roster.table
    rows, slots = roster.live_rows()
    if len(rows) < len(roster.running):  # a launch in flight brings pages back: wait for it
        return (), slots[:0], ratio
    left = sorted(roster.residents, key=RETRACTION_ORDERS[roster.settings.retraction_policy])
    while np.count_nonzero(table.kv_len[slots] % cache.page_size == 0) > cache.available_pages:
        row = left.pop()
        if left:
            _retract(roster, cache, row, -(-len(left) * RETRACT_STEPS // cache.page_size))
        elif table.planned[row.slot] > len(row.request.output_ids):
            return (), slots[:0], ratio  # the token in flight may end it
        else:
            abort(roster, row.request, JserveError(_OUT_OF_MEMORY))
        rows, slots = roster.live_rows()
    if left:
        longest = sum(row.request.limit for row in left)
        generated = sum(len(row.request.output_ids) for row in left)
        ratio = min(1.0, (generated + RETRACT_STEPS * len(left)) / (longest + 1))
    return rows, slots, ratio


def requeue_residents(roster: Roster) -> None:
    """The cache was reset and with it every lease: all wait again, or fail the second time."""
    residents = roster.residents
    for request in [one for one in roster.waiting if one.row is not None]:  # amid a plan
        roster.unqueue(request)
    for row in residents:
        wait_again(roster, row)
    roster.free_slots[:] = range(roster.settings.num_slots - 1, -1, -1)  # one that was lost, too
    for row in residents:
        row.request.num_resets += 1
        if row.request.num_resets > 1 and row.request.rid in roster.requests:
            message = "The device failed twice while this request was running."
            abort(roster, row.request, JserveError(message))


def requeue(roster: Roster, cache: CacheManager, row: Row) -> None:
    """Take a request off the device; later it draws the same tokens again. Of its KV the tree keeps
    the prompt, or what it had when it came."""
    cache.release(row.lease)
    row.request.num_retractions += 1
    row.request.ran = 0.0
    wait_again(roster, row)


def abort(roster: Roster, request: Request, error: JserveError) -> None:
    """End a request through no fault of its own."""
    message, status, kind = str(error), error.status_code, error.err_type
    finish = FinishReason(type="abort", message=message, status_code=status, err_type=kind)
    roster.end(request, finish)


def _retract(roster: Roster, cache: CacheManager, row: Row, evict: int) -> None:
    """Requeue for want of pages, and evict so many, that the others have some for a while."""
    request, totals = row.request, roster.totals
    requeue(roster, cache, row)
    cache.evict(evict)
    totals["num_retracted_requests_total"] += 1
    totals["num_retracted_input_tokens_total"] += len(request.prompt)
    totals["num_retracted_output_tokens_total"] += len(request.output_ids)


def wait_again(roster: Roster, row: Row) -> None:
    """A request that has lost its slot waits at its old place. One that filled the whole pool would
    wait for ever: the token that it drew last would need KV now.
    """
    request = row.request
    roster.vacate(row)
    roster.queue(request)
    roster.full = False
    if request.logprobs is not None:
        request.logprobs.restart()
    if len(request.prompt) + len(request.output_ids) > roster.capacity:
        abort(roster, request, JserveError(_OUT_OF_MEMORY))
