"""What a server tells of its requests as they go: nothing is done with it unless metrics are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jserve.metrics.timing import UNTIMED, Timing
from jserve.types import Delta, FinishReason, Submit, Times


@dataclasses.dataclass(frozen=True, slots=True)
class Meter:
    """Safe from any thread. Each is told the Submit of the sequence."""

    timing: Timing = UNTIMED
    #: (…, times): it has its first token.
    first_token: Callable[[Submit, Times], None] = lambda submit, times: None
    #: (…, count, seconds): `count` ≥ 1 tokens came `seconds` after the output before.
    tokens: Callable[[Submit, int, float], None] = lambda submit, count, seconds: None
    #: (…, why, the last Delta, tokens generated, times): it is over, also if its client has left.
    finished: Callable[[Submit, FinishReason, Delta, int, Times], None] = lambda *sequence: None
    #: (series, amount): a counter or gauge of this process changes.
    count: Callable[[str, int], None] = lambda series, amount: None


NO_METER = Meter()
