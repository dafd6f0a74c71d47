"""Who is where: waiting, having its prompt computed, decoding, over. Owns the queue, the slots and
every request's moves between them, and gives pages back through the CacheManager when a stay ends.
Decides nothing about who runs when.

    add → waiting → seat → chunked → (last chunk) running → end
             ↑______ interruption.py ______|
"""

from __future__ import annotations

import time

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.plan import SlotEdit
from jserve.scheduler.request import MAX_RESERVED_TOKENS, Request, Row, SchedulerSettings
from jserve.scheduler.rows import Chunk, Grant
from jserve.scheduler.totals import TOTALS
from jserve.types import Delta, FinishReason


class Roster:
    """The requests that are not over, and in `outbox` the Deltas that are due."""

    def __init__(self, settings: SchedulerSettings, cache: CacheManager) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # in order of arrival
        self.running: dict[int, Row] = {}  # prompt planned to its end; by slot, as admitted
        self.chunked: Row | None = None  # the one request whose prompt is cut
        self.free_slots = list(range(settings.num_slots - 1, -1, -1))
        self.table = SlotTable(settings.num_slots)
        self.full = False  # pages ran out for admission, and nothing has ended since
        self.outbox: list[Delta] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self._settings = settings
        self._cache = cache
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
        self.waiting.append(request)
        self.totals["prompt_tokens_total"] += len(request.prompt)

    def seat(self, request: Request, grant: Grant, now: float) -> Chunk:
        """Give an admitted request a slot. The caller drops it from `waiting`."""
        if request.seed is None:  # the first admission
            seed = request.submit.sampling.sampling_seed
            request.seed = int(self._seeds.integers(0, 2**63 - 1)) if seed is None else seed
            request.queue_time = now - request.arrived
            request.cached_tokens = grant.begin
            self.totals["cached_tokens_total"] += grant.begin
        self.totals["num_chunked_requests_total"] += not grant.final
        slot = self.free_slots.pop()
        request.row = row = Row(request, slot, grant.lease, request.tokens())
        self.table.fill(row)
        pages = grant.lease.pages[: grant.begin // self._settings.page_size].copy()
        sampling = request.slot_sampling(self._settings.eos_token_ids)
        outputs = np.array(request.output_ids, np.int32)
        return self.advance(row, grant, SlotEdit(slot, pages, sampling, outputs))

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

    def finish_prompt(self, request: Request) -> None:
        """The KV of the whole prompt is there."""
        request.prefill_finished = request.prefill_finished or time.time()
        if request.logprobs is not None:
            request.logprobs.scored = True
        if request.limit == 0:
            self.end(request, FinishReason(type="length", length=0))

    def end(self, request: Request, finish: FinishReason | None, *, keep: bool = True) -> None:
        """The request is over; its valid KV stays cached if `keep`. Without `finish` no Delta."""
        row = request.row
        if row is None:
            self.waiting.remove(request)
        else:
            # the last token has no KV, or a launch in flight is still to write it
            valid = len(request.prompt) + max(len(request.output_ids) - 1, 0)
            valid = min(valid, int(self.table.kv_len[row.slot])) if keep else 0
            self._cache.finish(row.lease, request.tokens()[:valid])
            self.vacate(row)
        del self.requests[request.rid]
        self.full = False
        self.totals["num_requests_total"] += 1
        if finish is not None:
            self.outbox.append(request.delta(finish))

    def vacate(self, row: Row) -> None:
        """End a stay whose lease is over: launches in flight lose the row, the slot is free."""
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
        self.reserve_all = np.zeros(num_slots, bool)  # ignore_eos: it will use its whole limit
        self.full_sampler = np.zeros(num_slots, bool)
        self.logprobs = np.zeros(num_slots, bool)

    def fill(self, row: Row) -> None:
        """A request moves in; its first chunk sets `kv_len`."""
        slot, request = row.slot, row.request
        sampling = request.submit.sampling
        self.planned[slot] = len(request.output_ids)
        self.limit[slot] = request.limit
        self.reserve_all[slot] = sampling.ignore_eos
        self.full_sampler[slot] = sampling.needs_full_sampler
        self.logprobs[slot] = request.logprobs is not None

    def reserve(self, slots: np.ndarray, ratio: float) -> float:
        """Tokens that the rows in `slots` are expected to need still."""
        to_come = np.minimum(self.limit[slots] - self.planned[slots], MAX_RESERVED_TOKENS)
        return float(np.where(self.reserve_all[slots], 1.0, ratio) @ to_come)
