"""A runner without a device: the next token is a formula of the whole context, and pages hold the
tokens themselves.

It obeys plans alone, as the real runner does, in launch order. Every row's context is read back
through its pages and compared with the tokens that the row should have, so that a page that was
reused, shared or freed wrongly fails the test at once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.plan import Kind, SampledLogprobs, ScoreOutcome, StepOutcome, StepPlan
from jserve.scheduler.request import Row, SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.types import (
    MAX_LOGPROB_IDS,
    MAX_TOP_LOGPROBS,
    Delta,
    LogprobParams,
    SamplingParams,
    Submit,
)

VOCAB = 64
EOS = 7


def next_token(context: Sequence[int], seed: int, index: int) -> int:
    return hash((tuple(context), seed, index)) % VOCAB


def logprob(context: Sequence[int], token: int) -> float:
    return -float(np.float32(hash((tuple(context), token)) % 1000 / 100))


def top_logprobs(context: Sequence[int]) -> list[tuple[float, int]]:
    pairs = sorted(((logprob(context, t), t) for t in range(VOCAB)), key=lambda p: (-p[0], p[1]))
    return pairs[:MAX_TOP_LOGPROBS]


def solo(submit: Submit, seed: int) -> list[int]:
    """What the request generates when nothing else exists."""
    sampling, context, outputs = submit.sampling, list(submit.prompt_ids), []
    stops = set() if sampling.ignore_eos else {EOS, *sampling.stop_token_ids}
    assert sampling.max_new_tokens is not None, "solo needs a limit"
    while len(outputs) < sampling.max_new_tokens:
        token = next_token(context, seed, len(outputs))
        outputs.append(token)
        context.append(token)
        if token in stops and len(outputs) > sampling.min_new_tokens:
            break
    return outputs


@dataclasses.dataclass
class Flight:
    plan: StepPlan
    outcome: StepOutcome
    log: list[tuple[str, int]]

    def read(self) -> StepOutcome:
        self.log.append(("read", self.plan.step))
        return self.outcome


class ScriptedRunner:
    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self.page_size = page_size
        self.pool = np.full((num_pages, page_size), -1, np.int64)
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.contexts: list[list[int]] = [[] for _ in range(num_slots)]
        self.seeds = [0] * num_slots
        self.outputs = [0] * num_slots
        self.logprob_ids: list[tuple[int, ...]] = [()] * num_slots
        self.last = [-1] * num_slots
        self.log: list[tuple[str, int]] = []
        self.seeds_seen: dict[str, set[int]] = {}
        self.nan_steps: set[int] = set()
        self.chunks: dict[str, int] = {}

    def launch(self, plan: StepPlan) -> Flight:
        self.log.append(("launch", plan.step))
        check_shapes(plan)
        rows = [row for row in plan.rows if isinstance(row, Row)]
        by_slot = {row.slot: row for row in rows}
        for edit in plan.edits:
            row = by_slot[edit.slot]
            self.tables[edit.slot] = edit.pages.tolist()
            self.contexts[edit.slot] = row.tokens[: len(edit.pages) * self.page_size].tolist()
            self.seeds[edit.slot] = edit.sampling.seed
            self.outputs[edit.slot] = len(edit.output_ids)
            self.logprob_ids[edit.slot] = edit.sampling.logprob_ids
            assert edit.output_ids.tolist() == row.request.output_ids
            self.seeds_seen.setdefault(row.request.rid, set()).add(edit.sampling.seed)
        at, contexts = 0, []
        for r, slot in enumerate(plan.slots.tolist()):
            end = at + int(plan.q_lens[r])
            if r >= plan.num_decode_rows:
                rid = rows[r].request.rid
                self.chunks[rid] = self.chunks.get(rid, 0) + 1
            for t in range(at, end):
                self._write(slot, int(plan.token_ids[t]), int(plan.new_pages[t]))
            assert len(self.contexts[slot]) == plan.kv_lens[r], f"{slot=} {plan.kv_lens[r]=}"
            contexts.append(list(self.contexts[slot]))
            at = end
        for slot, context in zip(plan.slots.tolist(), contexts, strict=True):
            self._check_readback(slot, context)
        return Flight(plan, self._sample(plan, contexts), self.log)

    def _write(self, slot: int, token: int, new_page: int) -> None:
        context, table = self.contexts[slot], self.tables[slot]
        position = len(context)
        assert bool(new_page) == (position % self.page_size == 0), f"{position=} {new_page=}"
        if new_page:
            assert len(table) == position // self.page_size, f"{len(table)=} {position=}"
            table.append(new_page)
        token = self.last[slot] if token == -1 else token
        assert token >= 0
        self.pool[table[position // self.page_size], position % self.page_size] = token
        context.append(token)

    def _check_readback(self, slot: int, context: list[int]) -> None:
        table = self.tables[slot]
        assert 0 not in table and len(set(table)) == len(table), table
        held = self.pool[table].reshape(-1)[: len(context)].tolist()
        assert held == context, f"{slot=} pages {table}: hold {held}, not {context}"

    def _sample(self, plan: StepPlan, contexts: list[list[int]]) -> StepOutcome:
        sampling = np.flatnonzero(plan.samples).tolist()
        n = len(sampling)
        tokens = np.zeros(n, np.int32)
        lps = SampledLogprobs(
            np.zeros(n, np.float32),
            np.zeros((n, MAX_TOP_LOGPROBS), np.float32),
            np.zeros((n, MAX_TOP_LOGPROBS), np.int32),
            np.zeros((n, MAX_LOGPROB_IDS), np.float32),
        )
        for i, r in enumerate(sampling):
            slot = int(plan.slots[r])
            assert plan.output_index[r] == self.outputs[slot]
            token = next_token(contexts[r], self.seeds[slot], self.outputs[slot])
            self.last[slot] = token
            self.outputs[slot] += 1
            tokens[i] = -1 if plan.step in self.nan_steps else token
            if plan.logprobs:
                lps.chosen[i] = logprob(contexts[r], token)
                lps.top_values[i], lps.top_ids[i] = zip(*top_logprobs(contexts[r]), strict=True)
                for k, wanted in enumerate(self.logprob_ids[slot]):
                    lps.id_values[i, k] = logprob(contexts[r], wanted)
        return StepOutcome(tokens, lps if plan.logprobs else None, self._score(plan))

    def _score(self, plan: StepPlan) -> ScoreOutcome | None:
        score = plan.score
        if score is None:
            return None
        m = len(score.tokens)
        values, ids = np.zeros(m, np.float32), np.zeros((m, MAX_LOGPROB_IDS), np.float32)
        top_values = np.zeros((m, MAX_TOP_LOGPROBS), np.float32)
        top_ids = np.zeros((m, MAX_TOP_LOGPROBS), np.int32)
        ends = np.cumsum(plan.q_lens)
        for i in range(m):
            t, slot = int(score.tokens[i]), int(score.slots[i])
            r = int(np.searchsorted(ends, t, side="right"))
            assert plan.slots[r] == slot
            context = self.contexts[slot][: int(plan.kv_lens[r]) - (int(ends[r]) - t) + 1]
            wrong = plan.step in self.nan_steps
            values[i] = math.nan if wrong else logprob(context, int(score.targets[i]))
            top_values[i], top_ids[i] = zip(*top_logprobs(context), strict=True)
            for k, wanted in enumerate(self.logprob_ids[slot]):
                ids[i, k] = logprob(context, wanted)
        if not score.want_top:
            return ScoreOutcome(values, None, None, None)
        return ScoreOutcome(values, top_values, top_ids, ids)


def check_shapes(plan: StepPlan) -> None:
    """What the real runner relies on."""
    r, t = len(plan.rows), plan.num_tokens
    for array in (plan.slots, plan.q_lens, plan.kv_lens, plan.output_index):
        assert array.shape == (r,) and array.dtype == np.int32
    assert plan.samples.shape == (r,) and plan.samples.dtype == np.bool_
    for array in (plan.token_ids, plan.new_pages):
        assert array.shape == (t,) and array.dtype == np.int32
    assert len(set(plan.slots.tolist())) == r and int(plan.q_lens.sum()) == t and r > 0
    assert (plan.token_ids[: plan.num_decode_rows] == -1).all()
    assert (plan.token_ids[plan.num_decode_rows :] >= 0).all()
    assert (plan.kind is Kind.DECODE) == bool((plan.q_lens == 1).all())
    for edit in plan.edits:
        assert edit.pages.dtype == np.int32 and edit.output_ids.dtype == np.int32
    if plan.score is not None:
        assert (np.diff(plan.score.tokens) > 0).all()
        assert plan.score.targets.dtype == plan.score.slots.dtype == np.int32


class Simulation:
    """Scheduler, cache and scripted runner in the real order of calls; checks integrity after every
    tick.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        depth: int = 1,
        radix: bool = True,
        clock: Callable[[], float] = time.monotonic,
        **settings: object,
    ) -> None:
        numbers: dict = {
            "num_slots": 4,
            "context_length": 96,
            "page_size": 4,
            "chunked_prefill_size": 16,
            "max_prefill_tokens": 64,
            "vocab_size": VOCAB,
            "eos_token_ids": (EOS,),
            "lookahead": depth,
        }
        self.settings = SchedulerSettings(**(numbers | settings))
        self.cache = CacheManager(num_pages, self.settings.page_size, radix=radix)
        self.scheduler = Scheduler(self.settings, self.cache, clock)
        self.runner = ScriptedRunner(num_pages, self.settings.page_size, self.settings.num_slots)
        self.depth = depth
        self.queue: deque[Flight] = deque()
        self.deltas: dict[str, list[Delta]] = {}
        self.plans: list[StepPlan] = []

    def tick(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.runner.log.append(("plan", plan.step))
            self.plans.append(plan)
            self.queue.append(self.runner.launch(plan))
        deltas = []
        if self.queue and (plan is None or len(self.queue) > self.depth):
            flight = self.queue.popleft()
            deltas = self.scheduler.commit(flight.plan, flight.read())
        for delta in [*deltas, *self.scheduler.drain()]:
            self.deltas.setdefault(delta.rid, []).append(delta)
        self.scheduler.check_integrity()

    def run(self, most: int = 100_000, each: Callable[[int], None] | None = None) -> None:
        """Tick until nothing is left."""
        for i in range(most):
            if not self.scheduler.has_work and not self.queue:
                return
            if each is not None:
                each(i)
            self.tick()
        raise AssertionError(f"not done after {most} ticks: {self.scheduler.stats()}")

    def outputs(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    def finish(self, rid: str) -> str | None:
        reason = self.deltas[rid][-1].finish
        return None if reason is None else reason.type

    def free_and_cached(self) -> bool:
        return self.cache.full_pages == self.cache.total_pages


def submit(
    rid: str,
    prompt: Sequence[int],
    max_new_tokens: int | None = 8,
    *,
    logprobs: LogprobParams | None = None,
    stream: bool = False,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    **sampling: object,
) -> Submit:
    params: dict = {"max_new_tokens": max_new_tokens, "sampling_seed": 5, **sampling}
    return Submit(
        rid=rid,
        prompt_ids=list(prompt),
        sampling=SamplingParams(**params),
        logprobs=logprobs,
        stream=stream,
        extra_key=extra_key,
        cache_salt=cache_salt,
        priority=priority,
    )


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 13 + 1) % VOCAB for i in range(n)]


def crowded(**settings) -> Simulation:
    """A pool in which running requests outgrow what admission reserved for them."""
    numbers = {
        "num_pages": 14,
        "num_slots": 8,
        "chunked_prefill_size": 8,
        "schedule_conservativeness": 0.02,
    }
    return Simulation(**(numbers | settings))


def busy_submits(n: int = 10) -> list:
    return [
        submit(
            f"r{i}",
            prompt(5 + 3 * (i % 5), salt=i % 3),
            24,
            sampling_seed=i,
            stream=i % 2 == 0,
        )
        for i in range(n)
    ]
