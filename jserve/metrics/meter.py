"""What a server tells of its requests as they go: nothing is done with it unless metrics are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jserve.metrics.timing import UNTIMED, Timing
from jserve.types import Delta, Times


@dataclasses.dataclass(frozen=True, slots=True)
class Meter:
    """Safe from any thread. `streaming`: whether the client gets tokens as they come."""

    timing: Timing = UNTIMED
    #: (streaming, times): a sequence has its first token.
    first_token: Callable[[bool, Times], None] = lambda streaming, times: None
    #: (count, seconds): `count` ≥ 1 tokens came `seconds` after the output before.
    tokens: Callable[[int, float], None] = lambda count, seconds: None
    #: (streaming, the last Delta, tokens generated, times): a sequence ended by itself.
    finished: Callable[[bool, Delta, int, Times], None] = lambda *sequence: None
    #: A sequence was aborted, by its client or by the engine.
    aborted: Callable[[], None] = lambda: None


NO_METER = Meter()
