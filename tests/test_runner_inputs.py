"""Packing and unpacking a plan, and the arithmetic that sizes the pool."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.batch import MOST_COUNTED, SlotState
from jserve.plan import Kind, SlotEdit, SlotSampling, StepPlan
from jserve.runner.inputs import EditLayout, StepLayout
from jserve.runner.masks import pad_mask
from jserve.runner.memory import DeviceMemory
from jserve.runner.programs import _unpack
from jserve.runner.recount import pack_recounts
from jserve.runner.stacked import pack_steps
from jserve.runner.window_share import WindowShare, kept_tokens
from jserve.types import KVShape

SLOTS, PAGE, PAGES = 6, 4, 9


def random_plan(seed, decode_rows, chunks):
    """A plan whose slots hold random tables; returns it with the tables before and after."""
    generator = np.random.default_rng(seed)
    q_lens = np.array([1] * decode_rows + chunks, np.int32)
    rows = len(q_lens)
    slots = generator.permutation(SLOTS)[:rows].astype(np.int32)
    before = generator.integers(0, 24 // PAGE, rows) * PAGE  # chunks begin at a page
    before[:decode_rows] += generator.integers(0, PAGE, decode_rows)
    kv_lens = (before + q_lens).astype(np.int32)
    final = generator.permutation(np.arange(1, 1 + SLOTS * PAGES)).reshape(SLOTS, PAGES)
    tables = np.zeros((SLOTS + 1, PAGES), np.int32)
    new_pages, token_ids = [], []
    for row, slot in enumerate(slots):
        owned = -(-int(before[row]) // PAGE)
        tables[slot, :owned] = final[slot, :owned]
        for position in range(before[row], kv_lens[row]):
            new_pages.append(0 if position % PAGE else final[slot, position // PAGE])
            token_ids.append(-1 if row < decode_rows else int(generator.integers(0, 90)))
    plan = StepPlan(
        step=1,
        kind=Kind.DECODE if (q_lens == 1).all() else Kind.MIXED,
        slots=slots,
        q_lens=q_lens,
        kv_lens=kv_lens,
        samples=generator.random(rows) < 0.7,
        output_index=generator.integers(0, 9, rows).astype(np.int32),
        num_decode_rows=decode_rows,
        token_ids=np.array(token_ids, np.int32),
        new_pages=np.array(new_pages, np.int32),
        full_sampler=False,
        logprobs=False,
    )
    return plan, tables, final


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 4),
    st.lists(st.integers(1, 10), max_size=2),
)
def test_what_the_device_unpacks_is_what_the_plan_says(seed, decode_rows, chunks):
    if not decode_rows + len(chunks):
        return
    plan, tables, final = random_plan(seed, decode_rows, chunks)
    decode = plan.kind is Kind.DECODE
    layout = StepLayout(8 if decode else SLOTS, 8 if decode else 32, SLOTS)
    last = np.arange(100, 101 + SLOTS, dtype=np.int32)
    state = SlotState(jnp.asarray(last), jnp.asarray(tables), jnp.zeros(1), ())  # type: ignore
    ids, context, state = _unpack(layout, jnp.asarray(layout.pack(plan)), state, PAGE, None)
    meta = context.meta
    rows, tokens = len(plan.slots), plan.num_tokens
    ends = np.cumsum(plan.q_lens)
    assert np.asarray(meta.cu_q_lens).tolist() == [
        0,
        *ends,
        *[tokens] * (layout.rows - rows),
    ]
    assert np.asarray(meta.kv_lens).tolist() == [*plan.kv_lens, *[0] * (layout.rows - rows)]
    assert np.asarray(meta.distribution).tolist() == [rows if decode else decode_rows, rows]
    row_of = np.repeat(np.arange(rows), plan.q_lens)
    position = np.concatenate(
        [np.arange(k - q, k) for k, q in zip(plan.kv_lens, plan.q_lens, strict=True)]
    )
    padding = layout.tokens - tokens
    assert np.asarray(meta.token_rows).tolist() == [*row_of, *[layout.rows] * padding]
    assert np.asarray(context.real).tolist() == [True] * tokens + [False] * padding
    assert np.asarray(meta.positions).tolist() == [*position, *[0] * padding]
    slot = plan.slots[row_of]
    where = final[slot, position // PAGE] * PAGE + position % PAGE
    assert np.asarray(meta.write_slots).tolist() == [*where, *[0] * padding]
    expected = np.where(plan.token_ids < 0, last[slot], plan.token_ids)
    assert np.asarray(ids)[:tokens].tolist() == expected.tolist()
    table = np.asarray(state.page_table)
    for row, number in enumerate(plan.slots):
        owned = -(-int(plan.kv_lens[row]) // PAGE)
        assert table[number, :owned].tolist() == final[number, :owned].tolist()
        assert not table[number, owned:].any()
        assert (np.asarray(meta.page_table)[row] == table[number]).all()
    assert not table[SLOTS].any(), "padding touches no table"
    fields = layout.split(layout.pack(plan))
    sampling = np.flatnonzero(plan.samples)
    n = len(sampling)
    assert fields.sample_tokens[:n].tolist() == (ends[sampling] - 1).tolist()
    assert fields.sample_slots.tolist() == [*plan.slots[sampling], *[SLOTS] * (SLOTS - n)]
    assert fields.sample_index[:n].tolist() == plan.output_index[sampling].tolist()


def test_a_cache_group_has_tables_and_slots_of_its_own():
    plan, tables, final = random_plan(5, 2, [9, 6])
    with pytest.raises(AssertionError, match="len"):
        StepLayout(SLOTS, 32, SLOTS, 1).pack(plan)
    kept = np.where(tables >= 8, tables + 1000, 0)  # the pages before have been freed
    shifted = np.where(plan.new_pages > 0, plan.new_pages + 1000, 0).astype(np.int32)
    plan = dataclasses.replace(plan, group_new_pages=(shifted,))
    layout = StepLayout(SLOTS, 32, SLOTS, 1)
    state = SlotState(
        jnp.zeros(1 + SLOTS, jnp.int32),
        jnp.asarray(tables),
        jnp.zeros(1),
        (),  # type: ignore
        (jnp.asarray(kept, jnp.int32),),
    )
    _, context, state = _unpack(layout, jnp.asarray(layout.pack(plan)), state, PAGE, None)
    (meta,), (table,) = context.group_metas, state.group_tables
    assert (
        np.asarray(context.meta.page_table)
        == np.asarray(state.page_table)[list(plan.slots) + [SLOTS] * 2]
    ).all()
    row_of = np.repeat(np.arange(len(plan.slots)), plan.q_lens)
    position = np.concatenate(
        [np.arange(k - q, k) for k, q in zip(plan.kv_lens, plan.q_lens, strict=True)]
    )
    slot = plan.slots[row_of]
    fresh = final[slot, position // PAGE] + 1000  # where a token's page is new or was kept
    old = np.asarray(kept)[slot, position // PAGE]
    page = np.where((old == 0) & (tables[slot, position // PAGE] > 0), 0, fresh)
    written = np.asarray(meta.write_slots)[: plan.num_tokens]
    assert written.tolist() == (page * PAGE + position % PAGE).tolist()
    for row, number in enumerate(plan.slots):
        assert (np.asarray(meta.page_table)[row] == np.asarray(table)[number]).all()
    assert not np.asarray(table)[SLOTS].any()
    assert (np.asarray(meta.kv_lens) == np.asarray(context.meta.kv_lens)).all()


def test_each_rank_knows_which_tokens_of_all_ranks_are_real():
    plans = [random_plan(0, 2, [3])[0], None, random_plan(1, 1, [])[0]]
    layout = StepLayout(SLOTS, 8, SLOTS, num_ranks=3)
    packed = pack_steps(layout, plans)
    table = jnp.zeros((SLOTS + 1, PAGES), jnp.int32)
    state = SlotState(jnp.zeros(1 + SLOTS, jnp.int32), table, jnp.zeros(1), ())  # type: ignore
    for mine, count in zip(packed, (5, 0, 1), strict=True):
        _, context, _ = _unpack(layout, jnp.asarray(mine), state, PAGE, None)
        assert np.sum(context.meta.token_rows < layout.rows) == count
        assert np.flatnonzero(context.real).tolist() == [0, 1, 2, 3, 4, 16]
    np.testing.assert_array_equal(packed[0, :-3], layout.pack(plans[0])[:-3])


def test_uploads_are_never_the_same_memory():
    plan, _, _ = random_plan(0, 2, [3])
    layout = StepLayout(SLOTS, 8, SLOTS)
    assert not np.shares_memory(layout.pack(plan), layout.pack(plan))


def test_an_edit_carries_every_parameter_bit_by_bit():
    layout = EditLayout(2, PAGES, SLOTS, 100)
    sampling = SlotSampling(
        seed=-(2**40) - 7,
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        frequency_penalty=-0.25,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        top_k=40,
        min_new_tokens=3,
        stop_ids=(7, 7, 2),
        bias_ids=(5, 1),
        bias_values=(-100.0, 2.5),
        logprob_ids=(9, 8),
    )
    edit = SlotEdit(4, np.array([3, 2], np.int32), sampling, np.zeros(0, np.int32))
    uploads = list(layout.pack([edit] * 3))
    assert len(uploads) == 2 and uploads[0].shape == layout.shape
    fields = layout.split(uploads[1])
    assert fields.slot[:, 0].tolist() == [4, SLOTS]
    high, low = fields.seed[0].astype(np.uint32).astype(np.uint64)
    assert (high << 32 | low).astype(np.int64) == sampling.seed
    floats = np.ascontiguousarray(fields.floats[0]).view(np.float32)
    assert floats.tolist() == np.float32([0.7, 0.9, 0.05, -0.25, 1.5, 1.1]).tolist()
    assert fields.ints[0].tolist() == [40, 3]
    assert fields.stop_ids[0, :3].tolist() == [7, 2, 102], "distinct, then ids of no token"
    assert fields.bias_ids[0, :3].tolist() == [5, 1, 102]
    assert len(set(fields.bias_ids[0].tolist())) == fields.bias_ids.shape[1]
    values = np.ascontiguousarray(fields.bias_values[0]).view(np.float32)
    assert values[:3].tolist() == [-100.0, 2.5, 0.0]
    assert fields.logprob_ids[0, :3].tolist() == [9, 8, 0]
    assert fields.pages[0].tolist() == [3, 2] + [0] * (PAGES - 2)
    both = EditLayout(2, PAGES, SLOTS, 100, num_groups=1)
    edit = dataclasses.replace(edit, group_pages=(np.array([0, 7], np.int32),))
    tables = both.split(next(iter(both.pack([edit])))).pages[0].reshape(2, PAGES)
    assert tables.tolist() == [[3, 2] + [0] * (PAGES - 2), [0, 7] + [0] * (PAGES - 2)]


def test_recounts_come_in_blocks_padded_with_no_token():
    none = np.zeros(0, np.int32)
    long = SlotEdit(3, none, SlotSampling(), np.arange(1030, dtype=np.int32) % 50)
    blocks = list(pack_recounts([SlotEdit(1, none, SlotSampling(), none), long], 50))
    assert [block[0] for block in blocks] == [3, 3]
    assert np.concatenate([b[1:] for b in blocks])[:1030].tolist() == long.output_ids.tolist()
    assert (blocks[1][7:] == 50).all()


def test_recounts_end_where_counts_would_wrap():
    endless = SlotEdit(2, np.zeros(0, np.int32), SlotSampling(), np.zeros(70_000, np.int32))
    blocks = np.concatenate([block[1:] for block in pack_recounts([endless], 50)])
    assert np.sum(blocks == 0) == np.iinfo(np.uint16).max == MOST_COUNTED


def test_a_mask_is_padded_with_rows_that_allow_everything():
    mask = np.zeros((2, 3), np.int32)
    assert pad_mask(mask, 4).tolist() == [[0] * 3, [0] * 3, [-1] * 3, [-1] * 3]
    with pytest.raises(AssertionError, match="dtype"):
        pad_mask(mask.astype(np.uint32), 4)


def test_the_pool_gets_what_weights_and_the_largest_step_leave_in_64ths():
    gib = 2**30
    memory = DeviceMemory(limit=64 * gib, weights=16 * gib, state=gib // 2, page=2**20)
    assert memory.num_pages(0.8) == 34 * 1024  # 51.2 − 16.5, rounded down to 1 GiB
    crowded = dataclasses.replace(memory, temporaries=20 * gib)
    assert crowded.num_pages(0.8) == 26 * 1024  # 0.98 · 64 − 20 − 16.5
    assert dataclasses.replace(memory, weights=60 * gib).num_pages(0.8) == 0
    slightly_less = dataclasses.replace(memory, state=gib // 2 + 5000)
    assert slightly_less.num_pages(0.8) == memory.num_pages(0.8), "so that cache keys repeat"
    share = WindowShare(3 * 2**20, 0.25, least=8, most=None)
    hybrid = dataclasses.replace(memory, shares=(share,))
    pages = hybrid.num_pages(0.8)
    assert hybrid.pool(pages) <= 34 * gib < hybrid.pool(pages + 1), "largest that fits"
    assert "sliding-window pool: 8 pages" in hybrid.table(21, 16)
    only_windows = dataclasses.replace(hybrid, page=0)
    assert share.pages(only_windows.num_pages(0.8)) == 34 * 1024 // 3
    table = memory.table(1024, 16)
    assert "KV pool: 16368 tokens in 1023 pages" in table and "free" in table


def window_share(num_layers: int = 2, ratio: float | None = None, slots: int = 4) -> WindowShare:
    group = KVShape(10, 1, 64, window=1024)
    sizes = {"page_size": 16, "num_slots": slots, "chunk": 256, "context_length": 32_768}
    return WindowShare.of(KVShape(num_layers, 1, 64), group, 1, ratio=ratio, **sizes)


def test_a_window_pool_holds_a_request_and_at_most_every_slots_window_twice():
    assert kept_tokens(1024, 16) == 1048
    share = window_share()
    one_window, chunk = 66 + 1, 16 + 1
    assert share.pages(5) == 5, "never more than the full pool"
    assert share.pages(101) == 1 + one_window + chunk, "but enough for one request"
    assert share.pages(801) == 401, "half of the full pool's"
    assert share.pages(1 << 20) == 1 + 8 * one_window + chunk, "as much as can be of use"
    assert window_share(ratio=0.1).pages(1 << 20) == 1 + -(-((1 << 20) - 1) // 10)
    assert window_share(num_layers=0).pages(80_001) == 10_001
