"""Who waits for what the engine says of a request: pure data of client.py and its users."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from jserve.types import Delta


@dataclasses.dataclass(slots=True, eq=False)
class Route:
    """An id in use: from before its Submit is made until its last Delta. `turn` tells uses of one
    id apart, for it is used again while old Deltas are on the way."""

    rid: str
    turn: int
    loop: asyncio.AbstractEventLoop
    #: gets the Deltas, on the loop, from when it is sent until it is closed; must not raise
    take: Callable[[Delta], None] | None = None
    aborted: bool = False  # by its caller, of which the engine hears only once it is sent
