"""A plan's way through the device: edits, forward, head; and what comes back.

Owns the donated KV pool and slot state, and the order of everything that touches them: one thread,
one step after the other, nothing waits for the device but InFlight.read, and nothing for a
compilation. Knows no request; startup.py makes it.

    launch(plan)        edit, recount, forward    (dispatched, not awaited)
    finish(flight, …)   head, score               (masks may be computed between the two)
    flight.read()       the only host sync
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import jax
import numpy as np

from jserve.batch import Hidden, SlotState
from jserve.cache.pool import KVPool
from jserve.plan import Kind, StepOutcome, StepPlan
from jserve.runner import logprobs
from jserve.runner.buckets import Key, first_ready
from jserve.runner.guard import CompileGuard
from jserve.runner.manifest import Manifest
from jserve.runner.masks import allow_everything, pad_mask
from jserve.runner.programs import Programs
from jserve.runner.recount import recount
from jserve.runner.score import ScoreInFlight


@dataclasses.dataclass(slots=True)
class InFlight:
    """One launched step. `hidden` lives until finish, the outputs until read; `out` is the head's,
    or where nothing samples the forward's slots, which tell that the step has run."""

    plan: StepPlan
    hidden: Hidden | None
    num_sampled: int
    out: jax.Array | None = None
    score: ScoreInFlight | None = None

    def read(self) -> StepOutcome:
        """Wait for the step and copy its results to the host."""
        assert self.hidden is None, f"step {self.plan.step} was not finished"
        score = None if self.score is None else self.score.read()
        out = np.asarray(self.out)[: self.num_sampled]
        tokens = np.array(out if out.ndim == 1 else out[:, 0])  # the head may do more than asked
        numbers = logprobs.read(out[:, 1:]) if self.plan.logprobs else None
        return StepOutcome(tokens, numbers, score)


class Runner:
    """One model on one mesh; `launch` and `finish` are called from one thread.

    Args:
        params: by WeightSpec.path, placed as the specs say.
        manifest: holds at least the required programs, compiled.
        num_pages: of the pool, the trash page included; `group_pages` are those of its groups.

    After an exception in launch, finish or read the donated arrays are gone: call `reset`.
    """

    def __init__(
        self,
        programs: Programs,
        params: Mapping[str, jax.Array],
        manifest: Manifest,
        guard: CompileGuard,
        num_pages: int,
    ) -> None:
        self.num_pages, self.guard = num_pages, guard
        self.tokens: Counter[str] = Counter()  # of the steps launched, by kind
        self.manifest, self._programs = manifest, programs
        self._buckets, self._ready = programs.buckets, manifest.ready
        shapes, self.group_pages = programs.shapes, programs.shapes.group_pages
        self._params = tuple(params[spec.path] for spec in shapes.model.specs)
        self._head_params = tuple(params[path] for path in shapes.model.head_params)
        self._no_mask = allow_everything(self._buckets.rows, shapes.vocab, shapes.replicated)
        self.reset()

    def close(self) -> None:
        """Stop background compilation, drop the process-wide listener and what is on the device."""
        self.manifest.cancel()
        self.guard.close()
        self._params, self._head_params, self._no_mask = (), (), {}
        self._kv = self._state = None

    def reset(self) -> None:
        """A zeroed pool and state, e.g. after a failed launch; nothing cached survives."""
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

    def launch(self, plan: StepPlan) -> InFlight:
        """Dispatch the step's edits and forward."""
        with self.guard:
            self._edit(plan)
            # Scores are read from mixed forwards only, so that fewer programs exist.
            mixed = plan.kind is Kind.MIXED or plan.score is not None
            keys = self._buckets.forwards(mixed, plan.num_tokens)
            if plan.score is not None:
                keys = (key for key in keys if Key("score", key.size) in self._ready)
            key = first_ready(keys, self._ready)
            forward, kind = self._ready[key], "mixed" if mixed else "decode"
            self.tokens[f"bucket_real_tokens_total/{kind}"] += plan.num_tokens
            self.tokens[f"bucket_padded_tokens_total/{kind}"] += key.size
            # A Compiled call uploads numpy itself, 0.3 ms sooner than a device_put before it.
            packed = self._programs.layout(mixed, key.size).pack(plan)
            self._kv, self._state, hidden = forward(self._params, self._kv, self._state, packed)
            return InFlight(plan, hidden, int(np.count_nonzero(plan.samples)))

    def finish(self, flight: InFlight, mask: np.ndarray | None = None) -> None:
        """Dispatch the head of a launched step, and the scoring that it asks for.

        `mask` is a grammar bitmask int32 [N, ceil(V / 32)], one row a sampling row in their order;
        its bits allow tokens.
        """
        plan, hidden = flight.plan, flight.hidden
        assert hidden is not None and self._state is not None, f"step {plan.step} was finished"
        with self.guard:
            flight.out = hidden.slots
            if flight.num_sampled:
                self._head(flight, hidden, mask)
            if plan.score is not None:
                program = self._ready[Key("score", len(hidden.all))]
                flight.score = ScoreInFlight.launch(
                    program, plan.score, self._head_params, self._state, hidden.all
                )
            flight.hidden = None

    def _edit(self, plan: StepPlan) -> None:
        for packed in self._programs.edit_layout.pack(plan.edits):
            self._state = self._ready[Key("edit")](self._state, packed)
        resumed = [edit for edit in plan.edits if len(edit.output_ids)]
        if resumed and self._state is not None:
            self._state = recount(self._ready[Key("recount")], self._state, resumed)

    def _head(self, flight: InFlight, hidden: Hidden, mask: np.ndarray | None) -> None:
        variant = flight.plan.full_sampler, flight.plan.logprobs
        key = first_ready(self._buckets.heads(flight.num_sampled, *variant), self._ready)
        allowed = self._no_mask[key.size] if mask is None else pad_mask(mask, key.size)
        rows = (hidden.rows, hidden.slots, hidden.output_index)
        self._state, out = self._ready[key](self._head_params, self._state, *rows, allowed)
        out.copy_to_host_async()
        flight.out = out
