"""The device programs of a step: pure functions with the shapes they are compiled for.

Owns what each program computes; manifest.py compiles them, runner.py calls them.

    forward(params, kv*, state*, packed) → kv, state, Hidden
        decode rows or ragged rows, one bucket each
    head(head params, state*, rows, slots, index, mask) → state, out
        tokens [n], with logprobs [n, 74]: token, logprobs.py's columns
    edit(state*, packed) → state
        slots at admission and resumption

* is donated. Legend as in batch.py; `out` is int32. Rarer programs: recount.py, score.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jserve import sampling
from jserve.batch import MOST_COUNTED, CallContext, Hidden, SlotParams, SlotState
from jserve.cache.pool import KVPool
from jserve.plan import Kind
from jserve.runner import logprobs as numbers
from jserve.runner.buckets import Buckets, Key
from jserve.runner.inputs import EditLayout, StepLayout
from jserve.runner.manifest import Program
from jserve.runner.shapes import Shapes, shardings
from jserve.runner.split_vocabulary import SplitVocabulary
from pallas_kernels.attention import AttentionMeta

EDIT_ROWS = 16


class Programs:
    """The step's programs for one model on one mesh."""

    def __init__(self, shapes: Shapes, buckets: Buckets) -> None:
        self.shapes, self.buckets, rules = shapes, buckets, shapes.rules
        rows, slots, groups = min(EDIT_ROWS, buckets.num_slots), buckets.num_slots, shapes.groups
        self.edit_layout = EditLayout(rows, shapes.pages, slots, shapes.vocab, len(groups))
        split = SplitVocabulary(rules, shapes.vocab) if rules.size("vocab") > 1 else None
        sample = functools.partial(sampling.sample, platform=rules.platform)
        self.greedy, self.sample = (split or sampling).greedy, split.sample if split else sample
        self.numbers = split or numbers

    def layout(self, mixed: bool, size: int) -> StepLayout:
        slots, shapes = self.buckets.num_slots, self.shapes
        rows = slots if mixed else size
        return StepLayout(rows, size, slots, len(shapes.groups), shapes.num_ranks)

    def forward(self, kind: Kind, size: int) -> Program:
        mixed, shapes = kind is Kind.MIXED, self.shapes
        layout = self.layout(mixed, size)

        def forward(
            params: Sequence[jax.Array], kv: KVPool, state: SlotState, packed: jax.Array
        ) -> tuple[KVPool, SlotState, Hidden]:
            named = dict(zip(shapes.params, params, strict=True))
            with jax.named_scope("inputs"):
                max_q_len = None if mixed else 1
                ids, context, state = _unpack(layout, packed, state, shapes.page_size, max_q_len)
            hidden, kv = shapes.model.forward(named, kv, context, ids)
            fields = layout.split(packed)
            rows, told = hidden[fields.sample_tokens], (fields.sample_slots, fields.sample_index)
            return kv, state, Hidden(rows, hidden, *told, kv.tally)

        arguments = (tuple(shapes.params.values()), shapes.kv, shapes.state)
        out = (shardings(shapes.kv), shardings(shapes.state), shapes.replicated)
        key = Key("forward", size, mixed)
        return Program(key, forward, (*arguments, shapes.int32(layout.size)), (1, 2), out)

    def head(self, rows: int, full: bool, logprobs: bool) -> Program:
        shapes = self.shapes

        def head(
            params: Sequence[jax.Array],
            state: SlotState,
            hidden: jax.Array,
            slots: jax.Array,
            output_index: jax.Array,
            mask: jax.Array,
        ) -> tuple[SlotState, jax.Array]:
            slots, output_index = slots[:rows], output_index[:rows]
            logits = self.logits(params, hidden[:rows])
            if full:
                of_rows = jax.tree.map(lambda leaf: leaf[slots], state.params)
                operands = (logits, of_rows, state.counts[slots], output_index, mask)
                tokens, distance = self.sample(*operands)
                uncounted = (tokens < 0) | (output_index >= MOST_COUNTED)
                counted = jnp.where(uncounted, state.counts.shape[1], tokens)
                counts = state.counts.at[slots, counted].add(1, mode="drop")
                state, out = dataclasses.replace(state, counts=counts), tokens
                if logprobs:
                    columns = self.numbers.columns(distance, tokens, of_rows.logprob_ids)
                    out = jnp.concatenate([tokens[:, None], columns], axis=1)
            else:
                out = tokens = self.greedy(logits, mask)
            last_token = state.last_token.at[slots].set(jnp.maximum(tokens, 0))
            return dataclasses.replace(state, last_token=last_token), out

        num_slots = self.buckets.num_slots
        slots, mask = shapes.int32(num_slots), shapes.int32(rows, math.ceil(shapes.vocab / 32))
        arguments = (shapes.head_params, shapes.state, shapes.hidden_rows(num_slots))
        arguments = (*arguments, slots, slots, mask)
        out = (shardings(shapes.state), shapes.replicated)
        return Program(Key("head", rows, full, logprobs), head, arguments, (1,), out)

    def logits(self, params: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """float32 [n, V], or as SplitVocabulary takes them."""
        named = dict(zip(self.shapes.model.head_params, params, strict=True))
        return self.shapes.model.logits(named, hidden)

    def edit(self) -> Program:
        layout, shapes = self.edit_layout, self.shapes

        def edit(state: SlotState, packed: jax.Array) -> SlotState:
            fields = layout.split(packed)
            slots = fields.slot[:, 0]
            page_table, *group_tables = jnp.split(fields.pages, 1 + layout.num_groups, axis=1)
            rows = SlotState(
                last_token=jnp.zeros(layout.rows, jnp.int32),
                page_table=page_table,
                counts=jnp.zeros((layout.rows, state.counts.shape[1]), state.counts.dtype),
                params=SlotParams(
                    seed=lax.bitcast_convert_type(fields.seed, jnp.uint32),
                    floats=lax.bitcast_convert_type(fields.floats, jnp.float32),
                    ints=fields.ints,
                    stop_ids=fields.stop_ids,
                    bias_ids=fields.bias_ids,
                    bias_values=lax.bitcast_convert_type(fields.bias_values, jnp.float32),
                    logprob_ids=fields.logprob_ids,
                ),
                group_tables=tuple(group_tables),
            )

            def write(i: jax.Array, state: SlotState) -> SlotState:
                return jax.tree.map(lambda leaf, row: leaf.at[slots[i]].set(row[i]), state, rows)

            return lax.fori_loop(0, layout.rows, write, state)

        arguments = (shapes.state, shapes.int32(*layout.shape))
        return Program(Key("edit"), edit, arguments, (0,), shardings(shapes.state))


def _unpack(
    layout: StepLayout, packed: jax.Array, state: SlotState, page_size: int, max_q_len: int | None
) -> tuple[jax.Array, CallContext, SlotState]:
    """The upload → token ids, what attention needs to know, the state with its tables extended."""
    fields, rows = layout.split(packed), layout.rows
    ends, order = fields.cu_q_lens[1:], jnp.arange(layout.tokens, dtype=jnp.int32)
    token_rows = jnp.sum(order[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)  # R: padding
    real = token_rows < rows
    everybody = (order[None, :] < fields.num_real[:, None]).reshape(-1)
    row = jnp.minimum(token_rows, rows - 1)
    positions = jnp.where(real, fields.kv_lens[row] - ends[row] + order, 0)
    slots, page_index = fields.slots[row], positions // page_size
    outside = layout.num_slots + 1 + order  # dropped, each its own index
    tables, metas = [], []
    new_pages = jnp.split(fields.new_pages, 1 + layout.num_groups)
    for table, new in zip((state.page_table, *state.group_tables), new_pages, strict=True):
        at = jnp.where(new > 0, slots, outside), page_index
        tables.append(table.at[at].set(new, mode="drop", unique_indices=True))
        page_table = tables[-1][fields.slots]
        write_slots = page_table[row, page_index] * page_size + positions % page_size
        meta = AttentionMeta(
            cu_q_lens=fields.cu_q_lens,
            kv_lens=fields.kv_lens,
            page_table=page_table,
            positions=positions,
            token_rows=token_rows,
            write_slots=jnp.where(real, write_slots, 0),
            distribution=fields.distribution,
            max_q_len=max_q_len,
        )
        metas.append(meta)
    token_ids = jnp.where(fields.token_ids < 0, state.last_token[slots], fields.token_ids)
    state = dataclasses.replace(state, page_table=tables[0], group_tables=tuple(tables[1:]))
    return token_ids, CallContext(metas[0], everybody, tuple(metas[1:])), state
