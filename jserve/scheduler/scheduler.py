"""The scheduler: what runs next, and what becomes of requests when a step's tokens are known.

Owns the decisions. Asks the roster who is where, CacheManager for pages, admission for budgets,
policy for the order; refuses to know devices, buckets, text and transport. Under overlap the order
of calls is plan(N + 1), commit(N): lengths advance when a step is planned, and what a launch in
flight returns for a row whose stay has ended is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.errors import RequestError
from jserve.plan import SampledLogprobs, StepOutcome, StepPlan
from jserve.scheduler.admission import Admission, prompt_budget
from jserve.scheduler.assembly import assemble
from jserve.scheduler.by_priority import make_measure
from jserve.scheduler.integrity import make_check
from jserve.scheduler.interruption import make_room
from jserve.scheduler.policy import POLICIES
from jserve.scheduler.priority import displace, make_rank
from jserve.scheduler.request import Request, Row, SchedulerSettings, make_request
from jserve.scheduler.roster import Roster
from jserve.scheduler.rows import NO_DECODE, Chunk, DecodeRows
from jserve.scheduler.scoring import keep_scores, plan_scores
from jserve.scheduler.sliding import WindowBudget
from jserve.scheduler.supervisor import Supervisor
from jserve.scheduler.upkeep import make_upkeep
from jserve.types import Delta, FinishReason, Submit


class Scheduler:
    """Requests in, StepPlans out; StepOutcomes in, Deltas out. One thread calls it. What is done to
    requests from outside is supervisor.py's."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: CacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert settings.page_size == cache.page_size, f"{settings.page_size=} {cache.page_size=}"
        self.settings, self.cache = settings, cache
        self._roster = Roster(settings, cache, clock)
        self._table = self._roster.table
        self._order_by = POLICIES[settings.policy]
        self._rank = make_rank(settings) or (lambda priority: 0)
        self._shuffles = np.random.default_rng((settings.seed + 1) % 2**63)
        self._initial_ratio = min(0.7 * settings.schedule_conservativeness, 1.0)
        self._ratio = self._initial_ratio  # of their limits that running requests will use
        self._num_arrived, self._step, self._hit_rate = 0, 0, 0.0
        self._measure = make_measure(cache, self._roster)
        self._upkeep = make_upkeep(self._roster, cache, lambda: self._ratio)
        outside = Supervisor(self._roster, cache, self._accept)
        self.abort, self.pause, self.resume = outside.abort, outside.pause, outside.resume
        self.finish, self.count, self.jump = outside.finish, outside.count, outside.jump
        self.drain, self.check_integrity = self._roster.drain, make_check(self._roster, cache)
        self.may_flush, self.flush_cache = outside.may_flush, outside.flush_cache
        self.reset_device, self.rebuild = outside.reset_device, outside.rebuild

    @property
    def has_work(self) -> bool:
        """Some request is not over."""
        return bool(self._roster.requests)

    @property
    def idle(self) -> bool:
        """Nothing to plan (no request, or a pause) or in flight: the time to check integrity."""
        return not self._roster.num_in_flight and (not self.has_work or self.paused)

    @property
    def paused(self) -> bool:
        """Nothing is planned; requests that come wait."""
        return self._roster.paused_at is not None

    def submit(self, submit: Submit) -> None:
        """Queue one sequence; RequestError when it can never run, QueueFullError when too many."""
        if submit.rid in self._roster.requests:
            raise RequestError(f"rid {submit.rid!r} is in use by an unfinished request.", "rid")
        capacity, now = self._roster.capacity, self._roster.clock()
        request = make_request(submit, self.settings, capacity, self._num_arrived, now)
        request.rank = self._rank(submit.priority)
        most = self.settings.max_queued
        if most is not None and len(self._roster.waiting) >= most:
            displace(self._roster, request)
        self._num_arrived += 1
        self._roster.add(request)

    def plan(self) -> StepPlan | None:
        """The next step, None when there is nothing to launch. The caller launches every plan."""
        if self.paused:
            return None
        for duty in self._upkeep:
            duty()
        room = self.settings.chunked_prefill_size - len(self._roster.running)
        if self.settings.mixed and room >= self.settings.page_size:
            decode = self._plan_decode()
            chunks = [] if decode.pressed else self._plan_prefill(len(decode.rows))
        else:  # prompts go first, by themselves
            chunks = self._plan_prefill(0)
            decode = NO_DECODE if chunks else self._plan_decode()
        if not self.has_work:
            self._ratio = self._initial_ratio
        if not chunks and not decode.rows:
            return None
        scores = any(chunk.row.request.score_from is not None for chunk in chunks)
        score = plan_scores(len(decode.rows), chunks) if scores else None
        plan = assemble(self._step, decode, chunks, score, self._table, self.cache)
        for chunk in chunks:  # other requests may use this KV from the next step on
            self.cache.commit(chunk.row.lease, chunk.row.tokens[: chunk.grant.end])
        self._step += 1
        self._roster.num_in_flight += 1
        num, most = self._roster.num_in_flight, self.settings.lookahead + 1
        assert num <= most, f"{num=} launches in flight, at most {most=}"
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[Delta]:
        """Take in the oldest launch's tokens; → its Deltas and those of what has ended since."""
        self._roster.num_in_flight -= 1
        rows, first_chunk = cast(tuple[Row, ...], plan.rows), plan.num_decode_rows
        if outcome.score is not None:
            keep_scores(rows, plan, outcome.score, self._roster.end)
        for row, kv_len in zip(rows[first_chunk:], plan.kv_lens[first_chunk:], strict=True):
            if row.alive:
                self._roster.finish_chunk(row.request, bool(kv_len == len(row.tokens)))
        sampling = rows if plan.samples.all() else [rows[r] for r in np.flatnonzero(plan.samples)]
        tokens = outcome.token_ids.tolist()
        for index, (row, token) in enumerate(zip(sampling, tokens, strict=True)):
            if row.alive:
                self._accept(row.request, token, outcome.logprobs, index)
        return self.drain()

    def stats(self) -> dict[str, float]:
        """Gauges and counters under the contract's metric names, without prefix."""
        own = {"cache_hit_rate": self._hit_rate, "new_token_ratio": self._ratio}
        return {**self._measure(), **own, "steps_total": self._step}

    def _plan_decode(self) -> DecodeRows:
        """One token for every running request that is not certain to end with what is in flight."""
        table, page_size = self._table, self.settings.page_size
        rows, slots = self._roster.live_rows()
        starting = np.flatnonzero(table.kv_len[slots] % page_size == 0)
        pressed = len(starting) > self.cache.available_pages
        if pressed:
            self.cache.counters.allocator_failures += 1
            rows, slots, self._ratio = make_room(self._roster, self.cache, self._ratio)
            starting = np.flatnonzero(table.kv_len[slots] % page_size == 0)
        elif rows:  # it falls to 14 % in 600 steps
            step, least = self._initial_ratio * 0.86 / 600, self._initial_ratio * 0.14
            self._ratio = max(self._ratio - step, least)
        new_pages = np.zeros(len(slots), np.int32)
        if len(starting):
            pages = self.cache.allocate(len(starting))
            assert pages is not None, f"{len(starting)=} {self.cache.available_pages=}"
            new_pages[starting] = pages
            for i, r in enumerate(starting.tolist()):
                rows[r].lease.extend(pages[i : i + 1])
        output_index = table.planned[slots]
        table.kv_len[slots] += 1
        table.planned[slots] += 1
        return DecodeRows(rows, slots, new_pages, output_index, pressed)

    def _plan_prefill(self, num_decode: int) -> list[Chunk]:
        """The cut request's next chunk, then what budgets, pages and slots admit of the queue."""
        roster, settings = self._roster, self.settings
        row, new = roster.chunked, roster.waiting and roster.free_slots and not roster.full
        if row is None and not new:
            return []
        table, slots = self._table, roster.live_rows()[1]
        admission = Admission(
            self.cache,
            settings.page_size,
            input_left=settings.max_prefill_tokens - num_decode,
            requests_left=settings.prefill_max_requests or settings.num_slots,
            chunk_left=prompt_budget(settings, num_decode, len(roster.waiting) - (row is None)),
            reserved=float(table.expected(slots, self._ratio).sum()),
            alone=not roster.residents,
            windows=[WindowBudget.of(g, table, slots, self._ratio) for g in self.cache.groups],
        )
        grant = None if row is None else admission.carry_on(row, int(table.kv_len[row.slot]))
        chunks = [] if row is None or grant is None else [roster.advance(row, grant)]
        if new and not admission.closed:
            chunks += self._admit(admission)
        return chunks

    def _admit(self, admission: Admission) -> list[Chunk]:
        """First chunks of waiting requests, in the policy's order."""
        roster, first, chunks = self._roster, [], []
        order_by, queue = self._order_by, roster.waiting
        for request in order_by(queue, self.cache, self._shuffles) if order_by else queue:
            if admission.closed or not roster.free_slots:
                break
            if (grant := admission.admit(request)) is None:
                break
            chunks.append(roster.seat(request, grant))
            if not request.num_retractions:
                first.append(grant)
        if first:
            self._hit_rate = sum(g.begin for g in first) / sum(g.end for g in first)
        roster.full = admission.no_room
        for chunk in chunks:
            roster.unqueue(chunk.row.request)
        return chunks

    def _accept(
        self, request: Request, token: int, sampled: SampledLogprobs | None, index: int
    ) -> None:
        """Append a sampled token and see whether it is NaN, a stop token or the last by length."""
        outputs, end = request.output_ids, self._roster.end
        valid = 0 <= token < self.settings.vocab_size
        outputs.append(token if valid else next(iter(self.settings.eos_token_ids), 0))
        if request.logprobs is not None and sampled is not None:
            request.logprobs.add(sampled, index)
        self._roster.totals["generation_tokens_total"] += 1
        if not valid:
            end(request, FinishReason(type="stop", matched="NaN happened"), keep=False)
        elif token in request.stop_ids and len(outputs) > request.submit.sampling.min_new_tokens:
            end(request, FinishReason(type="stop", matched=token))
        elif len(outputs) >= request.limit:
            end(request, FinishReason(type="length", length=len(outputs)))
        elif request.streams:
            self._roster.outbox.append(request.delta())
