"""Who is where: waiting, having its prompt computed, decoding, over. Owns the queue, the slots and
every request's moves between them, and gives pages back through the CacheManager when a stay ends.
Decides nothing about who runs when.

    add → waiting → seat → chunked → (last chunk) running → end
             ↑______ interruption.py ______|
"""

from __future__ import annotations

import bisect
import operator
import time
from collections.abc import Callable

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.plan import SlotEdit
from jserve.scheduler.request import MAX_RESERVED_TOKENS, Request, Row, SchedulerSettings
from jserve.scheduler.rows import Chunk, Grant
from jserve.scheduler.totals import TOTALS
from jserve.types import Delta, FinishReason

_place = operator.attrgetter("rank", "order")  # of a request, in the queue


class Roster:
    """The requests that are not over, and in `outbox` the Deltas that are due."""

    def __init__(
        self, settings: SchedulerSettings, cache: CacheManager, clock: Callable[[], float]
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by rank, then in order of arrival
        self.running: dict[int, Row] = {}  # prompt planned to its end; by slot, as admitted
        self.chunked: Row | None = None  # the one request whose prompt is cut
        self.free_slots = list(range(settings.num_slots - 1, -1, -1))
        self.table = SlotTable(settings.num_slots)
        self.full = False  # pages ran out for admission, and nothing has ended since
        self.outbox: list[Delta] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.paused_at: float | None = None  # since then nothing is planned
        self.num_in_flight = 0  # launches that were planned and not committed
        self.settings, self.clock = settings, clock
        self.capacity = cache.total_pages * settings.page_size  # tokens
        self._cache = cache
        self._observe = cache.counters.timing.observe
        self._seeds = np.random.default_rng(settings.seed % 2**63)
        self._arrays: tuple[tuple[Row, ...], np.ndarray] | None = None  # of `running`

    @property
    def residents(self) -> list[Row]:
        """Everybody with a slot."""
        return [*self.running.values(), *([] if self.chunked is None else [self.chunked])]

    def live_rows(self) -> tuple[tuple[Row, ...], np.ndarray]:
        """The running rows that are not certain to end with what is in flight, and their slots."""
        if self._arrays is None:
            slots = np.fromiter(self.running, np.int32, len(self.running))
            self._arrays = tuple(self.running.values()), slots
        rows, slots = self._arrays
        live = self.table.planned[slots] < self.table.limit[slots]
        if live.all():
            return rows, slots
        keep = np.flatnonzero(live)
        return tuple(rows[r] for r in keep), slots[keep]

    def add(self, request: Request) -> None:
        self.requests[request.rid] = request
        self.totals["prompt_tokens_total"] += len(request.prompt)
        self.queue(request)

    def queue(self, request: Request) -> None:
        """Let a request without a slot wait at its place."""
        request.since = self.clock()
        bisect.insort(self.waiting, request, key=_place)
        self.totals["num_waiting_tokens"] += len(request.prompt) + len(request.output_ids)
        self.totals["num_retracted_reqs"] += bool(request.num_retractions)
        self.full &= self.waiting[0] is not request

    def unqueue(self, request: Request) -> None:
        """It has a slot now, or is over. The queue may be long."""
        del self.waiting[bisect.bisect_left(self.waiting, _place(request), key=_place)]
        self.totals["num_waiting_tokens"] -= len(request.prompt) + len(request.output_ids)
        self.totals["num_retracted_reqs"] -= bool(request.num_retractions)

    def seat(self, request: Request, grant: Grant) -> Chunk:
        """Give an admitted request a slot. The caller takes it out of the queue."""
        request.since = request.since_chunk = self.clock()
        if request.seed is None:  # the first admission
            seed = request.submit.sampling.sampling_seed
            request.seed = int(self._seeds.integers(0, 2**63 - 1)) if seed is None else seed
            request.queue_time = request.since - request.arrived
            self._observe("queue_time_seconds", request.queue_time)
            request.cached_tokens = grant.begin
            self.totals["cached_tokens_total"] += grant.begin
            self.totals["uncached_tokens_total"] += len(request.prompt) - grant.begin
        self.totals["num_chunked_requests_total"] += not grant.final
        slot = self.free_slots.pop()
        request.row = row = Row(request, slot, grant.lease, request.tokens())
        self.table.fill(row)
        pages = grant.lease.pages[: grant.begin // self.settings.page_size].copy()
        sampling = request.slot_sampling(self.settings.eos_token_ids)
        outputs = np.array(request.output_ids, np.int32)
        beside = tuple(group.of[pages] for group in self._cache.groups)
        return self.advance(row, grant, SlotEdit(slot, pages, sampling, outputs, beside))

    def advance(self, row: Row, grant: Grant, edit: SlotEdit | None = None) -> Chunk:
        """Account for a granted chunk; with the last one the row joins the running ones."""
        slot = row.slot
        output_index = int(self.table.planned[slot])
        samples = grant.final and output_index < row.request.limit
        self.table.kv_len[slot] = grant.end
        self.table.planned[slot] += samples
        self.totals["num_prefill_chunks_total"] += 1
        self.totals["prefill_tokens_total"] += grant.end - grant.begin
        assert self.chunked is None or self.chunked is row, "two requests are cut"
        self.chunked = None if grant.final else row
        if grant.final:
            self.running[slot] = row
            self._arrays = None
        return Chunk(row, grant, output_index, samples, edit)

    def drain(self) -> list[Delta]:
        """Deltas that are due; without a step, of requests that were aborted or have failed."""
        deltas, self.outbox = self.outbox, []
        return deltas

    def finish_chunk(self, request: Request, last: bool) -> None:
        """The KV of a chunk is there, with the `last` one that of the whole prompt."""
        stage, now = "prefill_forward" if last else "chunked_prefill", self.clock()
        self._observe(f"per_stage_req_latency_seconds/{stage}", now - request.since_chunk)
        request.since_chunk = now
        request.num_chunks += 1
        if not last:
            return
        request.prefill_finished = request.prefill_finished or time.time()
        if request.logprobs is not None:
            request.logprobs.scored = True
        if request.limit == 0:
            self.end(request, FinishReason(type="length", length=0))

    def end(self, request: Request, finish: FinishReason | None, *, keep: bool = True) -> None:
        """The request is over, even if the cache fails; its valid KV stays cached if `keep`, else
        nothing of it. Without `finish` no Delta."""
        row = request.row
        if row is None:
            self.unqueue(request)
        else:
            self.vacate(row)
        del self.requests[request.rid]
        self.full = False
        self.totals["num_requests_total"] += 1
        if finish is not None:
            self.outbox.append(request.delta(finish))
        if row is not None and not keep:
            self._cache.discard(row.lease)
        elif row is not None:
            # the last token has no KV, or a launch in flight is still to write it
            valid = len(request.prompt) + max(len(request.output_ids) - 1, 0)
            valid = min(valid, int(self.table.kv_len[row.slot]))
            self._cache.finish(row.lease, request.tokens()[:valid], len(request.prompt))

    def vacate(self, row: Row) -> None:
        """End a stay, apart from its lease: launches in flight lose the row, the slot is free."""
        row.alive = False
        row.request.row = None
        self.free_slots.append(row.slot)
        if self.chunked is row:
            self.chunked = None
        else:
            del self.running[row.slot]
            self._arrays = None


class SlotTable:
    """The rows' changing numbers, by slot: planning 256 rows costs little more than one."""

    def __init__(self, num_slots: int) -> None:
        self.kv_len = np.zeros(num_slots, np.int32)  # tokens with KV, planned
        self.planned = np.zeros(num_slots, np.int32)  # output tokens, committed or in flight
        self.limit = np.zeros(num_slots, np.int32)
        self.slides_at = np.zeros(num_slots, np.int32)  # `kv_len` at which sliding.py has to look
        self.reserve_all = np.zeros(num_slots, bool)  # ignore_eos: it will use its whole limit
        self.full_sampler = np.zeros(num_slots, bool)
        self.logprobs = np.zeros(num_slots, bool)
        self.constrained = np.zeros(num_slots, bool)

    def fill(self, row: Row) -> None:
        """A request moves in; its first chunk sets `kv_len`."""
        slot, request = row.slot, row.request
        self.planned[slot] = len(request.output_ids)
        self.limit[slot] = request.limit
        self.slides_at[slot] = 0
        self.reserve_all[slot] = request.submit.sampling.ignore_eos
        self.full_sampler[slot] = request.needs_full_sampler
        self.logprobs[slot] = request.logprobs is not None
        self.constrained[slot] = request.submit.grammar is not None

    def expected(self, slots: np.ndarray, ratio: float) -> np.ndarray:
        """float64[·] of each row in `slots` the tokens that it is expected to need still."""
        to_come = np.minimum(self.limit[slots] - self.planned[slots], MAX_RESERVED_TOKENS)
        return np.where(self.reserve_all[slots], 1.0, ratio) * to_come
