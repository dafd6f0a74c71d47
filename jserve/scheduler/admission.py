"""How much prompt one step may take in: token budgets and page reserves. Opens leases and allocates
pages through the CacheManager; refuses to know slots, plans and the order of the queue.

A request is admitted when its uncached tokens, the output to come and one spare page are strictly
below what is free or evictable, less what the running requests are expected to need still. Prompts
longer than the step's chunk are cut at a page.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from jserve.cache.manager import CacheManager, Lease
from jserve.scheduler.mixing import mixed_size
from jserve.scheduler.request import Request, Row, SchedulerSettings
from jserve.scheduler.rows import Grant
from jserve.scheduler.sliding import WindowBudget


@dataclasses.dataclass(slots=True)
class Admission:
    """The prefill budget of one step, in tokens; every grant takes from it."""

    cache: CacheManager
    page_size: int
    input_left: int  # of the step, once it has a prompt
    chunk_left: int  # of the step, decode rows included
    reserved: float  # what running requests are expected to need still
    requests_left: int  # prompts that the step may still take in
    alone: bool  # no request is on the device: the first need not leave room for its output
    windows: Sequence[WindowBudget] = ()  # what the cache's groups have room for
    granted: bool = False
    no_room: bool = False  # one was refused for want of pages: ask when some are freed

    @property
    def closed(self) -> bool:
        """Nothing more fits into this step."""
        spent = self.granted and min(self.input_left, self.requests_left) <= 0
        return self.no_room or self.chunk_left <= 0 or spent

    def carry_on(self, row: Row, begin: int) -> Grant | None:
        """The next chunk of the request that was cut; None while there is no page for it."""
        total = len(row.tokens)
        length = min(self._cut(total - begin), self.cache.available_pages * self.page_size)
        if not length:
            self.chunk_left = 0  # it keeps its place: nobody else takes the pages that come free
            return None
        return self._grant(row.request, row.lease, begin, begin + length, total)

    def admit(self, request: Request) -> Grant | None:
        """A first chunk, its prefix locked; None: no more requests in this step."""
        started = time.perf_counter()
        grant = self._offer(request)
        request.cache_seconds += time.perf_counter() - started
        return grant

    def _offer(self, request: Request) -> Grant | None:
        tokens = request.tokens()
        prefix = (request.namespace, request.max_match, request.submit.priority or 0)
        lease = self.cache.open(tokens, *prefix)
        begin, total = lease.num_pages * self.page_size, len(tokens)
        extend = total - begin
        free = self.cache.full_pages * self.page_size
        reserved = None if self.alone else self.reserved
        self.no_room = not has_room(request, extend, free, reserved, self.page_size)
        over = self.granted and self._ceil(extend) >= self.input_left
        for window in self.windows:  # rows that slide make room: it asks again in the next step
            over |= not window.admit(request, extend, self._cut(extend), self.alone)
        length = 0 if self.no_room or over else self._cut(extend)
        if not length:
            self.cache.release(lease)
            return None
        return self._grant(request, lease, begin, begin + length, total)

    def _grant(self, request: Request, lease: Lease, begin: int, end: int, total: int) -> Grant:
        used = self._ceil(end - begin)
        pages = self.cache.allocate(used // self.page_size)
        assert pages is not None, f"{begin=} {end=} {self.cache.available_pages=}"
        lease.extend(pages)
        self.input_left -= used
        self.chunk_left -= used
        self.requests_left -= 1
        if end == total:
            self.reserved += self.page_size + request.tokens_to_come
        else:
            self.chunk_left = 0  # at most one request is cut
        self.granted, self.alone = True, False
        return Grant(lease, begin, end, pages, end == total)

    def _cut(self, extend: int) -> int:
        """All of `extend` if the step's chunk holds it, else whole pages, possibly none."""
        left = max(self.chunk_left, 0)
        return extend if extend <= left else left // self.page_size * self.page_size

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size


def prompt_budget(settings: SchedulerSettings, num_decode: int, behind: int = 0) -> int:
    """Prompt tokens of a step with `num_decode` decode rows, `behind` requests behind the first."""
    if num_decode:
        return mixed_size(settings, num_decode, behind) - num_decode
    return settings.chunked_prefill_size


def has_room(request: Request, extend: int, free: int, reserved: float | None, page: int) -> bool:
    """Whether `free` tokens hold `extend` prompt tokens and what comes after them, beside what is
    `reserved` for running requests. None: there are none, and its output need not fit yet."""
    if reserved is None:
        return extend <= free
    return extend + request.tokens_to_come + page < free - reserved
