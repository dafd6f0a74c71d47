"""Prompt log-probabilities of a launched step: the program, its uploads, its answer.

score(head params, logprob ids, all, packed) → out
    logprobs.py's columns for up to 256 positions of a mixed forward's T tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jserve.batch import SlotState
from jserve.plan import Score, ScoreOutcome
from jserve.runner import logprobs
from jserve.runner.buckets import Key
from jserve.runner.manifest import Program
from jserve.runner.programs import Programs

SCORE_ROWS = 256  # most prompt positions scored by one launch


def score_program(programs: Programs, tokens: int) -> Program:
    """Scores positions of a mixed forward of T = `tokens`."""
    shapes = programs.shapes

    def score(
        params: Sequence[jax.Array], logprob_ids: jax.Array, every: jax.Array, packed: jax.Array
    ) -> jax.Array:
        token, target, slot = packed
        numbers = programs.numbers
        distance = numbers.unscaled(programs.logits(params, every[token]))
        return numbers.columns(distance, target, logprob_ids[slot])

    arguments = (
        shapes.head_params,
        shapes.state.params.logprob_ids,
        shapes.hidden_rows(tokens),
        shapes.int32(3, min(SCORE_ROWS, tokens)),
    )
    return Program(Key("score", tokens), score, arguments, (), shapes.replicated)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreInFlight:
    """Launched scores: for each launch the positions held and the program's output."""

    score: Score
    blocks: list[tuple[int, jax.Array]]

    @classmethod
    def launch(
        cls,
        program: jax.stages.Compiled,
        score: Score,
        head_params: Sequence[jax.Array],
        state: SlotState,
        every: jax.Array,
    ) -> ScoreInFlight:
        """Dispatch; `every` is the forward's hidden state of each token."""
        ids = state.params.logprob_ids
        blocks = []
        for held, packed in pack_score(score, min(SCORE_ROWS, len(every)), len(ids) - 1):
            out = program(head_params, ids, every, packed)
            out.copy_to_host_async()
            blocks.append((held, out))
        return cls(score, blocks)

    def read(self) -> ScoreOutcome:
        """Wait, and copy to the host what was asked for."""
        return read_score(self.score, [np.asarray(out)[:held] for held, out in self.blocks])


def read_score(score: Score, blocks: Sequence[np.ndarray]) -> ScoreOutcome:
    """Copies of what was asked for, of each launch's rows."""
    found = logprobs.read(np.concatenate(blocks))
    if not score.want_top:
        return ScoreOutcome(found.chosen, None, None, None)
    return ScoreOutcome(found.chosen, found.top_values, found.top_ids, found.id_values)


def no_score(rows: int, trash_slot: int) -> np.ndarray:
    """An upload that scores nothing."""
    packed = np.zeros((3, rows), np.int32)
    packed[2] = trash_slot
    return packed


def pack_score(score: Score, rows: int, trash_slot: int) -> Iterator[tuple[int, np.ndarray]]:
    """(positions held, int32 [3, rows] of tokens, targets, slots) for each `rows` positions."""
    for first in range(0, len(score.tokens), rows):
        part = slice(first, first + rows)
        held = len(score.tokens[part])
        packed = no_score(rows, trash_slot)
        packed[0, :held], packed[1, :held] = score.tokens[part], score.targets[part]
        packed[2, :held] = score.slots[part]
        yield held, packed
