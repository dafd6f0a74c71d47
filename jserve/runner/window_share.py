"""How large the pool of a sliding-window group is beside the full one. Numbers only: knows no
device, and not what the pages hold.

A live request keeps its window and the chunk that is being computed; what else the pool holds are
the windows at the ends of cached prefixes.
"""

from __future__ import annotations

import dataclasses
import math

from jserve.types import KVShape

#: Tokens behind the window that a live request keeps beside a page: those of launches in flight,
#: which may come to nothing, so that the last whole page before them can still be matched.
IN_FLIGHT = 8


def kept_tokens(window: int, page_size: int) -> int:
    """How many of its latest tokens a live request keeps in a group of this window."""
    return window + page_size + IN_FLIGHT


@dataclasses.dataclass(frozen=True, slots=True)
class WindowShare:
    """One group's pool. Pages; `ratio`: per page of the full pool."""

    page_bytes: int
    ratio: float
    least: int  # one request with the largest chunk
    most: int | None  # all slots, as many cached windows, and a chunk; None: no bound

    @classmethod
    def of(
        cls,
        shape: KVShape,
        group: KVShape,
        page_bytes: int,
        *,
        page_size: int,
        num_slots: int,
        chunk: int,
        context_length: int,
        ratio: float | None,
    ) -> WindowShare:
        """`ratio` None: half of the full pool's tokens, or what one whole context needs if that is
        more. A model without full layers has nothing else to keep: there an eighth, or as above,
        because its full pages cost nothing.
        """
        assert group.window is not None, f"{group=}"
        window = -(-kept_tokens(group.window, page_size) // page_size) + 1
        chunk = -(-chunk // page_size) + 1
        context = -(-context_length // page_size)
        usual = 0.5 if shape.num_layers else 0.125
        automatic = ratio is None and shape.num_layers > 0
        return cls(
            page_bytes,
            min(1.0, max(usual, (window + chunk) / context)) if ratio is None else ratio,
            least=window + chunk,
            most=2 * num_slots * window + chunk if automatic else None,
        )

    def pages(self, full: int) -> int:
        """Of the group's pool beside `full` pages; both count their trash page."""
        wanted = math.ceil((full - 1) * self.ratio)
        if self.most is not None:
            wanted = min(wanted, self.most)
        return 1 + min(full - 1, max(wanted, self.least))
