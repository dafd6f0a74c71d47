"""Every rank's plan through one program: as runner.py, with a leading axis over ranks.

The ranks agree on the smallest program that holds each one's plan; one without a plan takes part
with padding only. Owns the donated pools and states of all, as runner.py does of one.

    launch([plan | None, …])        edit, recount, forward
    finish(flight, [mask | None])   head, score
    flight.read()                   → [outcome | None, …]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jserve.batch import Hidden, SlotState
from jserve.cache.pool import KVPool
from jserve.plan import Kind, StepOutcome, StepPlan
from jserve.runner import logprobs
from jserve.runner.buckets import Key, first_ready
from jserve.runner.guard import CompileGuard
from jserve.runner.inputs import EditLayout, StepLayout
from jserve.runner.manifest import Manifest
from jserve.runner.masks import allow_everything, pad_mask
from jserve.runner.programs import Programs
from jserve.runner.recount import no_recount, pack_recounts
from jserve.runner.score import SCORE_ROWS, no_score, pack_score, read_score
from sharding.ranks import AXIS

Plans = Sequence[StepPlan | None]


@dataclasses.dataclass(slots=True)
class StackedInFlight:
    """One launched step of all ranks, as InFlight; `scores`: for each launch the positions that
    each rank holds, and the output."""

    plans: Plans
    hidden: Hidden | None
    num_sampled: list[int]
    out: jax.Array | None = None
    scores: list[tuple[Sequence[int], jax.Array]] = dataclasses.field(default_factory=list)

    def read(self) -> list[StepOutcome | None]:
        """Wait for the step and copy its results to the host; None where there was no plan."""
        assert self.hidden is None, "the step was not finished"
        out = np.asarray(self.out)
        blocks = [(held, np.asarray(block)) for held, block in self.scores]
        return [
            None if plan is None else self._outcome(rank, plan, out, blocks)
            for rank, plan in enumerate(self.plans)
        ]

    def _outcome(
        self,
        rank: int,
        plan: StepPlan,
        out: np.ndarray,
        blocks: list[tuple[Sequence[int], np.ndarray]],
    ) -> StepOutcome:
        score = None
        if plan.score is not None:
            score = read_score(plan.score, [block[rank, : held[rank]] for held, block in blocks])
        mine = out[rank, : self.num_sampled[rank]]
        tokens = np.array(mine if mine.ndim == 1 else mine[:, 0])
        numbers = logprobs.read(mine[:, 1:]) if plan.logprobs else None
        return StepOutcome(tokens, numbers, score)


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """What a StackedRunner counts for a rank that is not the first: `tokens` of the steps launched,
    by kind. What ranks have in common, the first one tells."""

    tokens: Counter[str]
    recompiles: int = 0
    compiled: tuple[int, int] = (0, 0)


class StackedRunner:
    """One model on ranks of one mesh; `launch` and `finish` are called from one thread.

    Args: as Runner's; the programs are those of one rank, the manifest's of all. `tokens` and what
    else is counted here are the first rank's; `others` have their own.

    After an exception in launch, finish or read the donated arrays of all ranks are gone: `reset`.
    """

    def __init__(
        self,
        programs: Programs,
        params: Mapping[str, jax.Array],
        manifest: Manifest,
        guard: CompileGuard,
        num_pages: int,
    ) -> None:
        shapes = programs.shapes
        assert shapes.rules.ranks is not None, "no ranks to stack"
        self.num_ranks, self.num_pages, self.guard = shapes.rules.ranks.count, num_pages, guard
        self.tokens: Counter[str] = Counter()
        self.others = [Counted(Counter()) for _ in range(self.num_ranks - 1)]
        self.manifest, self._programs = manifest, programs
        self._buckets, self._ready = programs.buckets, manifest.ready
        self.group_pages, self._columns = shapes.group_pages, shapes.state.counts.shape[1]
        self._params = tuple(params[spec.path] for spec in shapes.model.specs)
        self._head_params = tuple(params[path] for path in shapes.model.head_params)
        by_rank = NamedSharding(shapes.rules.mesh, PartitionSpec(AXIS))
        self._no_mask = allow_everything(
            self._buckets.rows, shapes.vocab, by_rank, (self.num_ranks,)
        )
        self.reset()

    def close(self) -> None:
        """Stop background compilation, drop the process-wide listener and what is on the device."""
        self.manifest.cancel()
        self.guard.close()
        self._params, self._head_params, self._no_mask = (), (), {}
        self._kv = self._state = None

    def reset(self) -> None:
        """Zeroed pools and states, e.g. after a failed launch; nothing cached survives."""
        self._kv: KVPool | None = None
        self._state: SlotState | None = None
        self._kv, self._state = self._ready[Key("init")]()

    @property
    def recompiles(self) -> int:
        return self.guard.recompiles

    @property
    def compiled(self) -> tuple[int, int]:
        """(programs compiled, programs in all)."""
        return len(self._ready), self.manifest.total

    def launch(self, plans: Plans) -> StackedInFlight:
        """Dispatch the edits and the forward of a step in which some rank has a plan."""
        live = [plan for plan in plans if plan is not None]
        with self.guard:
            self._edit(plans)
            scored = any(plan.score is not None for plan in live)
            mixed = scored or any(plan.kind is Kind.MIXED for plan in live)
            keys = self._buckets.forwards(mixed, max(plan.num_tokens for plan in live))
            if scored:
                keys = (key for key in keys if Key("score", key.size) in self._ready)
            key = first_ready(keys, self._ready)
            forward, layout = self._ready[key], self._programs.layout(mixed, key.size)
            kind = "mixed" if mixed else "decode"
            counters = (self.tokens, *(rank.tokens for rank in self.others))
            for plan, tokens in zip(plans, counters, strict=True):
                tokens[f"bucket_real_tokens_total/{kind}"] += 0 if plan is None else plan.num_tokens
                tokens[f"bucket_padded_tokens_total/{kind}"] += key.size
            packed = pack_steps(layout, plans)
            self._kv, self._state, hidden = forward(self._params, self._kv, self._state, packed)
            sampled = [0 if p is None else int(np.count_nonzero(p.samples)) for p in plans]
            return StackedInFlight(plans, hidden, sampled)

    def finish(self, flight: StackedInFlight, masks: Sequence[np.ndarray | None]) -> None:
        """Dispatch the head of a launched step, and the scoring that it asks for; `masks` as
        Runner.finish has them, by rank."""
        hidden = flight.hidden
        assert hidden is not None and self._state is not None, "the step was finished"
        with self.guard:
            flight.out = hidden.slots
            if any(flight.num_sampled):
                self._head(flight, hidden, masks)
            if any(plan is not None and plan.score is not None for plan in flight.plans):
                self._score(flight, hidden, self._state)
            flight.hidden = None

    def _edit(self, plans: Plans) -> None:
        edits = [() if plan is None else plan.edits for plan in plans]
        layout = self._programs.edit_layout
        for packed in _together([layout.pack(some) for some in edits], no_edit(layout)):
            self._state = self._ready[Key("edit")](self._state, packed)
        resumed = [pack_recounts(some, self._columns) for some in edits]
        for packed in _together(resumed, no_recount(self._columns)):
            self._state = self._ready[Key("recount")](self._state, packed)

    def _head(
        self, flight: StackedInFlight, hidden: Hidden, masks: Sequence[np.ndarray | None]
    ) -> None:
        live = [plan for plan in flight.plans if plan is not None]
        variant = any(plan.full_sampler for plan in live), any(plan.logprobs for plan in live)
        key = first_ready(self._buckets.heads(max(flight.num_sampled), *variant), self._ready)
        allowed = self._no_mask[key.size]
        if any(mask is not None for mask in masks):
            free = np.zeros((0, allowed.shape[2]), np.int32)
            allowed = np.stack([pad_mask(free if m is None else m, key.size) for m in masks])
        rows = (hidden.rows, hidden.slots, hidden.output_index)
        self._state, out = self._ready[key](self._head_params, self._state, *rows, allowed)
        out.copy_to_host_async()
        flight.out = out

    def _score(self, flight: StackedInFlight, hidden: Hidden, state: SlotState) -> None:
        """As many launches as the rank with the most positions takes."""
        tokens, ids = hidden.all.shape[1], state.params.logprob_ids
        rows, program = min(SCORE_ROWS, tokens), self._ready[Key("score", tokens)]
        wanted = [None if plan is None else plan.score for plan in flight.plans]
        blocks = [() if s is None else pack_score(s, rows, ids.shape[1] - 1) for s in wanted]
        nothing = 0, no_score(rows, ids.shape[1] - 1)
        for parts in itertools.zip_longest(*blocks, fillvalue=nothing):
            held, packed = zip(*parts, strict=True)
            out = program(self._head_params, ids, hidden.all, np.stack(packed))
            out.copy_to_host_async()
            flight.scores.append((held, out))


def pack_steps(layout: StepLayout, plans: Plans) -> np.ndarray:
    """[D, size]: the upload of each rank, which is told how many tokens all of them have."""
    packed = np.stack([no_step(layout) if p is None else layout.pack(p) for p in plans])
    num_real = [[0 if p is None else p.num_tokens] for p in plans]
    layout.split(packed.T).num_real[:] = num_real  # [D, 1]: a row for each number, ranks across
    return packed


def no_step(layout: StepLayout) -> np.ndarray:
    """The upload of a rank without a plan: padding only."""
    packed = np.zeros(layout.size, np.int32)
    fields = layout.split(packed)
    fields.slots[:] = fields.sample_slots[:] = layout.num_slots
    return packed


def no_edit(layout: EditLayout) -> np.ndarray:
    """The upload of a rank that edits no slot."""
    packed = np.zeros(layout.shape, np.int32)
    layout.split(packed).slot[:] = layout.num_slots
    return packed


def _together(uploads: Sequence[Iterable[np.ndarray]], nothing: np.ndarray) -> Iterator[np.ndarray]:
    """One upload of all ranks for each of those that have the most."""
    for parts in itertools.zip_longest(*uploads, fillvalue=nothing):
        yield np.stack(parts)
