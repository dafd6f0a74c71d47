"""Device records of a step: a forward's context, what slots remember, what forward hands on.

All are pytrees of device arrays. They know nothing of requests, buckets or packing
(runner/inputs.py).

Legend: T tokens, R rows, S slots (the last is the trash slot: padding rows write there), P pages a
slot can hold, V vocabulary, D hidden size, N rows that can sample in one step (= S − 1).

Later per-call features (adapters, captured hidden states) are fields of CallContext; a model passes
it on and reads only its own.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.attention import AttentionMeta

#: Columns of SlotParams.floats and SlotParams.ints.
TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)
TOP_K, MIN_NEW_TOKENS = range(2)
MOST_COUNTED = 2**16 - 1  # first tokens that a request has generated: penalties know those


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class CallContext:
    """One forward call; `meta` describes the ragged rows, built once and shared by all layers, but
    those of a cache group: they have one of `group_metas`, which differs in pages. `real`: of the
    tokens that a feed-forward layer is given, those of all ranks in their order, which are no
    padding.
    """

    meta: AttentionMeta
    real: jax.Array  # bool[T]; [D · T] where D data-parallel ranks share such layers
    group_metas: tuple[AttentionMeta, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SlotParams:
    """Sampling parameters, one row a slot (or, gathered, one row a sampling row).

    Scattered lists are padded with V + j, all different and none a token's, so that a scatter may
    claim unique indices and drops them.
    """

    seed: jax.Array  # uint32[S, 2] threefry key data of an int64
    floats: jax.Array  # float32[S, 6]
    ints: jax.Array  # int32[S, 2]
    stop_ids: jax.Array  # int32[S, MAX_STOP_TOKEN_IDS] forbidden by min_new_tokens
    bias_ids: jax.Array  # int32[S, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32[S, MAX_LOGIT_BIAS]
    logprob_ids: jax.Array  # int32[S, MAX_LOGPROB_IDS] padded with 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SlotState:
    """What the device remembers of requests, by slot. Donated to every program and returned."""

    last_token: jax.Array  # int32[S]
    page_table: jax.Array  # int32[S, P]
    counts: jax.Array  # uint16[S, V] generated tokens; right only for slots with a penalty
    params: SlotParams
    group_tables: tuple[jax.Array, ...] = ()  # int32[S, P] of each cache group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """Forward → head and score; rows are in sampling order, N of them whatever the bucket."""

    rows: jax.Array  # [N, D] last-token hidden state of each sampling row
    all: jax.Array  # [T, D] every token's
    slots: jax.Array  # int32[N] trash slot for padding
    output_index: jax.Array  # int32[N] tokens the request has generated before this one
    tally: tuple[jax.Array, ...] = ()  # KVPool's, as it is behind this step
