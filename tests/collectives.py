"""What devices tell each other in a compiled program: every collective, with the bytes it gives.

Reads XLA's text. An operation inside a loop counts once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_CALL = re.compile(rf" = (.*?) ({'|'.join(KINDS)}|collective-broadcast)(?:-start)?\(")
_ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


def collectives(program: Any) -> Counter[tuple[str, int]]:
    """(kind, bytes of its result on one device) → how many there are."""
    found: Counter[tuple[str, int]] = Counter()
    for shapes, kind in _CALL.findall(program.as_text()):
        for name, bits, sizes in _ARRAY.findall(shapes):
            item = 1 if name == "pred" else int(bits) // 8
            found[kind, item * math.prod(map(int, filter(None, sizes.split(","))))] += 1
    return found
