"""The records by which scheduler and runner meet: numpy in, numpy out.

The scheduler imports no jax and the runner knows no request, so everything here is a number or an
array. A plan names no bucket: runner/buckets.py pads. What only some steps have is one frozen
sub-record, None in the others.

Legend: R rows, T tokens, P pages a slot can hold, N rows that sample, all before padding.

    rows of a step  decode rows (q_len 1, input: the slot's last sampled token), then prompt chunks
    kv_lens[r]      tokens of row r in the cache when the step has run, its own q_lens[r] included
    new_pages[t]    page that begins at token t (its position: a multiple of page_size), 0 elsewhere
    group_…         the same of each cache group (types.KVShape.groups); most models have none
    page 0          the trash page: padding writes there, no request ever owns it
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np


class Kind(enum.Enum):
    """decode: every row has exactly one token. mixed: rows are ragged."""

    DECODE = "decode"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSampling:
    """A request's sampling parameters as its slot keeps them; lists within SamplingParams' caps."""

    seed: int = 0  # int64
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 1 << 30  # TOP_K_ALL: all
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # what min_new_tokens forbids: EOS and stop_token_ids
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    logprob_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SlotEdit:
    """Initialises one slot at admission or resumption, before the step's forward."""

    slot: int
    pages: np.ndarray  # int32[≤ P] that the request already has (a cached prefix), in order
    sampling: SlotSampling
    output_ids: np.ndarray  # int32[·] generated before a retraction: penalty counts come from them
    group_pages: tuple[np.ndarray, ...] = ()  # as `pages`; 0 or any page where it is not needed


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Prompt log-probabilities: of token `targets[i]`, given the hidden state of `tokens[i]`."""

    tokens: np.ndarray  # int32[M] indices among the step's T tokens, ascending
    targets: np.ndarray  # int32[M] the next prompt token
    slots: np.ndarray  # int32[M] whose logprob_ids apply
    want_top: bool  # some request asked for top_logprobs or token ids of its prompt


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch. StepOutcome's arrays have an entry for each row with samples[r], in order."""

    step: int
    kind: Kind
    slots: np.ndarray  # int32[R]
    q_lens: np.ndarray  # int32[R] ≥ 1
    kv_lens: np.ndarray  # int32[R]
    samples: np.ndarray  # bool[R]
    output_index: np.ndarray  # int32[R] how many tokens the request has generated before this one
    num_decode_rows: int
    token_ids: np.ndarray  # int32[T] −1: take the slot's last sampled token
    new_pages: np.ndarray  # int32[T]
    full_sampler: bool  # some sampling row needs more than argmax
    logprobs: bool  # some sampling row wants log-probabilities
    constrained: bool = False  # some row's answer follows a grammar
    group_new_pages: tuple[np.ndarray, ...] = ()  # int32[T] each
    edits: tuple[SlotEdit, ...] = ()
    score: Score | None = None
    rows: tuple[object, ...] = ()  # the scheduler's own handles, one a row; opaque to the runner

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Under the distribution drawn from: after penalties, bias, mask and temperature."""

    chosen: np.ndarray  # float32[N]
    top_values: np.ndarray  # float32[N, MAX_TOP_LOGPROBS] best first
    top_ids: np.ndarray  # int32[N, MAX_TOP_LOGPROBS]
    id_values: np.ndarray  # float32[N, MAX_LOGPROB_IDS] undefined beyond the slot's list


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOutcome:
    """Answer to Score, same order; `top_*` and `id_values` are None unless want_top."""

    values: np.ndarray  # float32[M]
    top_values: np.ndarray | None  # float32[M, MAX_TOP_LOGPROBS]
    top_ids: np.ndarray | None
    id_values: np.ndarray | None  # float32[M, MAX_LOGPROB_IDS]


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """What InFlight.read returns: host copies, valid for ever."""

    token_ids: np.ndarray  # int32[N] −1: NaN logits
    logprobs: SampledLogprobs | None
    score: ScoreOutcome | None
