"""What a model with sliding windows adds to a step: window pages that rows have left behind are let
go before it is planned, and a prompt is admitted only if its windows find room too. Models without
windows have none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jserve.cache.window import WindowGroup
from jserve.scheduler.request import Request
from jserve.scheduler.roster import Roster, SlotTable


class Sliding:
    """A duty of upkeep.py."""

    def __init__(self, roster: Roster, groups: Sequence[WindowGroup]) -> None:
        self._roster, self._groups = roster, groups

    def slide(self) -> None:
        """Every row's next token is the one after its planned KV."""
        roster, table = self._roster, self._roster.table
        rows, slots = roster.live_rows()
        if roster.chunked is not None:
            rows, slots = (*rows, roster.chunked), np.append(slots, roster.chunked.slot)
        due = np.flatnonzero(table.kv_len[slots] >= table.slides_at[slots])
        if len(due):
            leases, slots = [rows[i].lease for i in due.tolist()], slots[due]
            next_tokens = table.kv_len[slots]
            looks = [group.slide(leases, next_tokens) for group in self._groups]
            table.slides_at[slots] = np.minimum.reduce(looks)


@dataclasses.dataclass(slots=True)
class WindowBudget:
    """The room of one group in one step, in tokens; after a refusal nobody else is asked about."""

    group: WindowGroup
    reserved: float  # what running requests are expected to need still, until they only slide
    gained: int = 0  # pages of requests that may be taken off the device

    @classmethod
    def of(
        cls, group: WindowGroup, table: SlotTable, slots: np.ndarray, ratio: float
    ) -> WindowBudget:
        """`slots`: the running rows'; `ratio`: of their limits that they will use."""
        growth = np.maximum(group.kept - table.kv_len[slots], 0)
        needed = np.minimum(table.expected(slots, ratio), growth) + group.page_size
        return cls(group, float(needed.sum()))

    def admit(self, request: Request, extend: int, chunk: int, alone: bool) -> bool:
        """As has_room; and what the request will need after its first chunk is reserved."""
        room = self.has_room(request, extend, chunk, alone)
        self.reserved += max(self._peak(request, extend, chunk) - chunk, 0)
        return room

    def has_room(self, request: Request, extend: int, chunk: int, alone: bool) -> bool:
        """For a request of `extend` prompt tokens, of which the first `chunk` are computed now."""
        page, free = self.group.page_size, self.group.available + self.gained
        if alone:
            return -(-chunk // page) <= free
        return self._peak(request, extend, chunk) < free * page - self.reserved

    def _peak(self, request: Request, extend: int, chunk: int) -> int:
        whole = extend + request.tokens_to_come
        return min(whole, self.group.kept + chunk) + self.group.page_size
