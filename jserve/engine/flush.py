"""Waiting for the engine to be idle, to flush its cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from jserve.errors import RequestError
from jserve.types import ControlReply

_POLL = 0.02  # seconds between two attempts
_LONGEST = 3600.0  # seconds


async def flush_when_idle(
    control: Callable[[str], Awaitable[ControlReply]], timeout: float
) -> ControlReply:
    """Ask until it is done, at most `timeout` seconds long; → the last reply.

    Raises RequestError for a timeout that is below 0 or over an hour, and what `control` raises.
    """
    if not 0 <= timeout <= _LONGEST:
        rule = f"timeout must be seconds, from 0 to {_LONGEST:.0f}, got {timeout}."
        raise RequestError(rule, "timeout")
    deadline = time.monotonic() + timeout
    while not (reply := await control("flush_cache")).ok and time.monotonic() < deadline:
        await asyncio.sleep(_POLL)
    return reply
