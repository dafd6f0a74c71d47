"""Requests that end without an answer: an error as a Delta, and a Delta's finish as an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from jserve.errors import EngineDeadError, JserveError, QueueFullError, RequestError, TimedOutError
from jserve.types import Delta, FinishReason, Submit

logger = logging.getLogger("jserve.engine")


def refused(submit: Submit, error: Exception) -> Delta:
    """The answer to a request that the scheduler did not take."""
    message = str(error)
    if not isinstance(error, JserveError):  # our fault, but only this request's
        logger.error("cannot submit %s", submit.rid, exc_info=error)
        message, error = repr(error), JserveError()
    finish = FinishReason(
        type="abort", message=message, status_code=error.status_code, err_type=error.err_type
    )
    length = len(submit.prompt_ids)
    rid, turn = submit.rid, submit.turn
    return Delta(rid=rid, turn=turn, token_ids=[], finish=finish, prompt_tokens=length)


def aborted(submit: Submit) -> Delta:
    """The answer to a request that was aborted before the scheduler had it."""
    finish = FinishReason(type="abort", message="The request was aborted.")
    rid, turn, length = submit.rid, submit.turn, len(submit.prompt_ids)
    return Delta(
        rid=rid, turn=turn, token_ids=[], finish=finish, prompt_tokens=length, ended=time.time()
    )


def lost(requests: Iterable[tuple[str, int]], why: str) -> list[Delta]:
    """The answer to requests, by their rids and turns, whose engine has ended."""
    finish = FinishReason(
        type="abort",
        message=why,
        status_code=EngineDeadError.status_code,
        err_type=EngineDeadError.__name__,
    )
    now = time.time()
    return [Delta(rid=r, turn=t, token_ids=[], finish=finish, ended=now) for r, t in requests]


def raise_refusal(finish: FinishReason) -> None:
    """Raise what an abort with a status stands for; other finishes are results."""
    if finish.type != "abort" or finish.status_code is None:
        return
    message = finish.message or "The request was aborted."
    if finish.status_code == RequestError.status_code:
        raise RequestError(message)
    errors: dict[str, type[JserveError]] = {QueueFullError.err_type: QueueFullError}
    errors |= {TimedOutError.err_type: TimedOutError, EngineDeadError.__name__: EngineDeadError}
    raise errors.get(finish.err_type or "", JserveError)(message)
