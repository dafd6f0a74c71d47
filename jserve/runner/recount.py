"""Penalty counts of a resumed request: rebuilt on device from the tokens it has generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jserve.batch import MOST_COUNTED, SlotState
from jserve.plan import SlotEdit
from jserve.runner.buckets import Key
from jserve.runner.manifest import Program
from jserve.runner.shapes import Shapes, shardings

RECOUNT_IDS = 1024  # output ids per launch


def recount_program(shapes: Shapes) -> Program:
    """recount(state*, packed) → state."""

    def recount(state: SlotState, packed: jax.Array) -> SlotState:
        counts = state.counts.at[packed[0], packed[1:]].add(1, mode="drop")
        return dataclasses.replace(state, counts=counts)

    arguments = (shapes.state, shapes.int32(1 + RECOUNT_IDS))
    return Program(Key("recount"), recount, arguments, (0,), shardings(shapes.state))


def recount(program: jax.stages.Compiled, state: SlotState, edits: Sequence[SlotEdit]) -> SlotState:
    """Dispatch for the edited slots' output ids; `state` is donated."""
    for packed in pack_recounts(edits, state.counts.shape[1]):
        state = program(state, packed)
    return state


def no_recount(vocab: int) -> np.ndarray:
    """An upload that counts nothing."""
    return np.full(1 + RECOUNT_IDS, vocab, np.int32)


def pack_recounts(edits: Sequence[SlotEdit], vocab: int) -> Iterator[np.ndarray]:
    """For each 1,024 output ids of a resumed request: [slot, ids …] padded with V."""
    for edit in edits:
        counted = edit.output_ids[:MOST_COUNTED]
        for first in range(0, len(counted), RECOUNT_IDS):
            ids = counted[first : first + RECOUNT_IDS]
            packed = no_recount(vocab)
            packed[0] = edit.slot
            packed[1 : 1 + len(ids)] = ids
            yield packed
