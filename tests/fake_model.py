"""A model that computes by hand: what it reads back through the page table decides its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jserve.plan import Kind, Score, SlotEdit, SlotSampling, StepPlan
from jserve.types import KVShape
from jserve.weights.spec import WeightSpec

VOCAB = 96
PAGE = 4


class FakeModel:
    """Row h of the table `head` is the logits, h = Σ (token + 1) · (7 · position + 3) mod VOCAB
    over the context.

    K holds token ids and V positions, as the step wrote them: a wrong slot, page or length changes
    the token. Over several devices the table has columns of no token.
    """

    head_params = ("head",)
    vocab_size = VOCAB
    cache = KVShape(num_layers=1, num_kv_heads=2, head_dim=4)
    tallies = ()

    def __init__(self, shards=1):
        columns = VOCAB if shards == 1 else shards * 128
        self.specs = (
            WeightSpec("scale", (1,), "float32", (None,), ()),
            WeightSpec("head", (VOCAB, columns), "float32", (None, "vocab"), ()),
        )

    def forward(self, params, kv, context, token_ids):
        meta = context.meta
        k = _write(kv.k, meta.write_slots, token_ids)
        v = _write(kv.v, meta.write_slots, meta.positions)
        rows = meta.page_table.shape[0]
        real = meta.token_rows < rows
        tables = meta.page_table[jnp.minimum(meta.token_rows, rows - 1)]
        tokens = token_ids.shape[0]
        past = k[tables][..., 0, 0].reshape(tokens, -1)
        positions = v[tables][..., 1, 0].reshape(tokens, -1)
        valid = jnp.arange(past.shape[1])[None, :] <= meta.positions[:, None]
        terms = jnp.where(valid, (past + 1) * (7 * positions + 3), 0.0)
        total = jnp.sum(terms, axis=1).astype(jnp.int32) % VOCAB
        hidden = jax.nn.one_hot(total, VOCAB) * params["scale"][0]
        return jnp.where(real[:, None], hidden, 0.0), kv._replace(k=k, v=v)

    def logits(self, params, hidden):
        return jnp.take(params["head"], jnp.argmax(hidden, axis=1), axis=0)


def _write(pool, slots, values):
    flat = pool.reshape(-1, *pool.shape[2:])
    rows = jnp.broadcast_to(
        values.astype(pool.dtype)[:, None, None], (len(values), *flat.shape[1:])
    )
    return flat.at[slots].set(rows).reshape(pool.shape)


def head_table(seed=0):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2


def fake_params(rules, head=None):
    arrays = {"scale": np.ones(1, np.float32), "head": head_table() if head is None else head}
    specs = FakeModel(rules.size("vocab")).specs
    (_, wide) = (spec.shape[-1] for spec in specs)
    arrays["head"] = np.pad(arrays["head"], ((0, 0), (0, wide - VOCAB)), constant_values=99)
    return {s.path: jax.device_put(arrays[s.path], rules.sharding(s.axes)) for s in specs}


def context_logits(ids, head):
    """Logits after the context `ids`, computed directly."""
    positions = np.arange(len(ids))
    return head[int(np.sum((np.asarray(ids) + 1) * (7 * positions + 3))) % VOCAB]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the runner reads of config.Resolved."""

    kv_dtype: str = "float32"
    context_length: int = 64
    page_size: int = PAGE
    num_slots: int = 4
    chunked_prefill_size: int = 16
    max_total_tokens: int | None = 400
    mem_fraction_static: float = 0.9
    recompile_guard: str = "error"
    swa_full_tokens_ratio: float | None = None


@dataclasses.dataclass
class FakeRequest:
    """A request as a driver keeps it: known ids, pages in order, how much of it is in the cache."""

    slot: int
    prompt: list[int]
    sampling: SlotSampling = dataclasses.field(default_factory=SlotSampling)
    outputs: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    pending: int = 0  # sampled on device, not yet read

    @property
    def ids(self):
        return self.prompt + self.outputs


class Driver:
    """A scheduler in twenty lines: hands out pages, builds plans, keeps requests by slot."""

    def __init__(self, runner):
        self.runner = runner
        self.free = list(range(1, runner.num_pages))
        self.edits = []
        self.step = 0

    def admit(self, request, resumed=()):
        output_ids = np.array(resumed, np.int32)
        self.edits.append(
            SlotEdit(request.slot, np.array(request.pages, np.int32), request.sampling, output_ids)
        )
        return request

    def plan(self, work, *, full=False, logprobs=False, score=None):
        """`work`: (request, tokens) pairs, decode rows first; tokens 0 is a decode row fed by the
        device."""
        rows = [self._row(request, count) for request, count in work]
        q_lens = np.array([len(ids) for ids, _, _ in rows], np.int32)
        flat = lambda part: np.array([x for row in rows for x in row[part]], np.int32)  # noqa: E731
        edits, self.edits = tuple(self.edits), []
        self.step += 1
        requests = [request for request, _ in work]
        return StepPlan(
            step=self.step,
            kind=Kind.DECODE if (q_lens == 1).all() else Kind.MIXED,
            slots=np.array([r.slot for r in requests], np.int32),
            q_lens=q_lens,
            kv_lens=np.array([r.cached for r in requests], np.int32),
            samples=np.array([sampled for _, _, sampled in rows], bool),
            output_index=np.array([len(r.outputs) + r.pending - 1 for r in requests], np.int32)
            + np.array([not sampled for _, _, sampled in rows], np.int32),
            num_decode_rows=sum(count == 0 for _, count in work),
            token_ids=flat(0),
            new_pages=flat(1),
            full_sampler=full,
            logprobs=logprobs,
            edits=edits,
            score=score,
        )

    def _row(self, request, count):
        start, known = request.cached, len(request.ids)
        ids = request.ids[start : start + count] if count else [-1]
        new_pages = []
        for position in range(start, start + len(ids)):
            begins = position % PAGE == 0 and position // PAGE >= len(request.pages)
            new_pages.append(self.free.pop() if begins else 0)
            if begins:
                request.pages.append(new_pages[-1])
        request.cached += len(ids)
        sampled = count == 0 or request.cached == known
        request.pending += sampled
        return ids, new_pages, sampled

    def run(self, work, mask=None, **options):
        plan = self.plan(work, **options)
        flight = self.runner.launch(plan)
        self.runner.finish(flight, mask)
        return self.record(work, plan, flight)

    def record(self, work, plan, flight):
        outcome = flight.read()
        sampling = [request for (request, _), s in zip(work, plan.samples, strict=True) if s]
        for request, token in zip(sampling, outcome.token_ids.tolist(), strict=True):
            request.pending -= 1
            request.outputs.append(token)
        return outcome


def prompt_score(request, first, count, want_top, offset=0):
    """Score of `count` positions of a row whose first token of this step is prompt position
    `first`."""
    tokens = np.arange(offset, offset + count, dtype=np.int32)
    targets = np.array(request.prompt[first + 1 : first + 1 + count], np.int32)
    return Score(tokens, targets, np.full(count, request.slot, np.int32), want_top)
