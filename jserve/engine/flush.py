"""Waiting for the engine to be idle, to flush its cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from jserve.engine.sendable import check_sendable
from jserve.errors import RequestError, TimedOutError
from jserve.types import ControlReply

_POLL = 0.02  # seconds between two attempts
_LONGEST = 3600.0  # seconds


async def flush_when_idle(
    control: Callable[[str], Awaitable[ControlReply]], timeout: float
) -> ControlReply:
    """Ask until it is done, at most `timeout` seconds long; → the last reply.

    Raises RequestError for a timeout that is below 0 or over an hour, and what `control` raises; a
    rank that does not answer may do so later.
    """
    check_sendable("timeout", timeout)
    if type(timeout) not in (int, float) or not 0 <= timeout <= _LONGEST:
        rule = f"timeout must be seconds, from 0 to {_LONGEST:.0f}, got {timeout!r}."
        raise RequestError(rule, "timeout")
    deadline = time.monotonic() + timeout
    while True:
        try:
            reply = await control("flush_cache")
            if reply.ok or time.monotonic() >= deadline:
                return reply
        except TimedOutError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL)
