"""The device code of jax_triton.py. Imports triton, so it is imported only where jax-triton is
used.

Both kernels read the pool [slots, K, D] through the page table [R, P]; see pallas_triton.py for the
two algorithms. Here lanes past an edge are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(query, keys, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """query [M, D] · keys [N, D] in base 2, capped."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * SCALE
    if SOFT_CAP > 0.0:
        # tanh from one exponential, which does not overflow
        shrunk = tl.exp2(-2.0 * LOG2E * tl.abs(scores) / SOFT_CAP)
        size = SOFT_CAP * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0.0, -size, size)
    return scores * LOG2E


@triton.jit
def _slot(table_row_ptr, index, first_page, visible, PAGE: tl.constexpr):
    """Pool slots (int64) of context positions; masked lanes read slot 0 of the layer."""
    page = tl.load(table_row_ptr + index // PAGE, mask=visible, other=0) + first_page
    return page.to(tl.int64) * PAGE + index % PAGE


@triton.jit
def flash_decode(
    first_page_ptr,
    distribution_ptr,
    cu_q_lens_ptr,
    table_ptr,
    kv_lens_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    weighted_ptr,  # [R, SPLITS, H, D]
    maximum_ptr,  # [R, SPLITS, H]
    total_ptr,  # [R, SPLITS, H]
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row, one KV head, one split of the row's context."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    first_page = tl.load(first_page_ptr)
    kv_len = tl.load(kv_lens_ptr + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - WINDOW, 0)
    lowest = begin // BLOCK
    blocks = tl.cdiv(kv_len, BLOCK) - lowest
    per_split = tl.cdiv(blocks, SPLITS)
    first = lowest + split * per_split
    last = tl.minimum(first + per_split, lowest + blocks)

    lane = tl.arange(0, LANES)
    column = tl.arange(0, WIDTH)
    real = (lane < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    heads = head * GROUP + lane
    token = tl.where(
        kv_len > 0, tl.load(cu_q_lens_ptr + row), 0
    )  # a padding row's may be past the end
    q_offset = (token * HEADS + heads)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q_ptr + q_offset, mask=real, other=0.0)
    maximum = tl.full([LANES], -1e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES, WIDTH], tl.float32)
    for i in range(first, last):
        index = i * BLOCK + tl.arange(0, BLOCK)
        visible = (index >= begin) & (index < kv_len)
        slot = _slot(table_ptr + row * PAGES, index, first_page, visible, PAGE)
        offset = (slot * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        loaded = visible[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(k_ptr + offset, mask=loaded, other=0.0).to(query.dtype)
        values = tl.load(v_ptr + offset, mask=loaded, other=0.0).to(query.dtype)
        scores = _scores(query, keys, SCALE, SOFT_CAP, PRECISION)
        scores = tl.where(visible[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        added = tl.dot(weights.to(query.dtype), values, input_precision=PRECISION)
        weighted = weighted * shrink[:, None] + added
        maximum = new_maximum
    part = (row * SPLITS + split) * HEADS + heads
    tl.store(weighted_ptr + part[:, None] * HEAD_DIM + column[None, :], weighted, mask=real)
    tl.store(maximum_ptr + part, maximum, mask=lane < GROUP)
    tl.store(total_ptr + part, total, mask=lane < GROUP)


@triton.jit
def ragged_prefill(
    first_page_ptr,
    distribution_ptr,
    cu_q_lens_ptr,
    table_ptr,
    kv_lens_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,  # [H]
    out_ptr,  # [T, H, D]
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of QUERY_BLOCK consecutive queries of a row, with all query heads of one KV head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    # Row r's tiles begin at cu_q_lens[r] // QUERY_BLOCK + r.
    row_lane = tl.arange(0, ROW_LANES)
    in_rows = row_lane < ROWS
    first_tile = tl.load(cu_q_lens_ptr + row_lane, mask=in_rows, other=0) // QUERY_BLOCK + row_lane
    row = tl.sum(((first_tile <= tile) & in_rows).to(tl.int32), 0) + -1  # pyright: ignore[reportOperatorIssue] -- typed as a tuple
    start = tl.load(cu_q_lens_ptr + row)
    q_len = tl.load(cu_q_lens_ptr + row + 1) - start
    offset = (tile - start // QUERY_BLOCK - row) * QUERY_BLOCK
    if (row >= tl.load(distribution_ptr + 1)) | (offset >= q_len):
        return
    first_page = tl.load(first_page_ptr)
    kv_len = tl.load(kv_lens_ptr + row)
    lane = tl.arange(0, QUERY_BLOCK * PADDED)
    column = tl.arange(0, WIDTH)
    query_index = offset + lane // PADDED
    group_lane = lane % PADDED
    heads = head * GROUP + group_lane
    real = (query_index < q_len) & (group_lane < GROUP)
    mask = real[:, None] & (column < HEAD_DIM)[None, :]
    at = ((start + query_index) * HEADS + heads)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q_ptr + at, mask=mask, other=0.0)
    position = kv_len - q_len + query_index
    end = kv_len - q_len + tl.minimum(offset + QUERY_BLOCK, q_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - q_len + offset - WINDOW + 1, 0)

    maximum = tl.full([QUERY_BLOCK * PADDED], -1e30, tl.float32)
    total = tl.zeros([QUERY_BLOCK * PADDED], tl.float32)
    weighted = tl.zeros([QUERY_BLOCK * PADDED, WIDTH], tl.float32)
    for i in range(begin // BLOCK, tl.cdiv(end, BLOCK)):
        index = i * BLOCK + tl.arange(0, BLOCK)
        owned = (index >= begin) & (index < end)
        slot = _slot(table_ptr + row * PAGES, index, first_page, owned, PAGE)
        kv_offset = (slot * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        loaded = owned[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(k_ptr + kv_offset, mask=loaded, other=0.0).to(query.dtype)
        values = tl.load(v_ptr + kv_offset, mask=loaded, other=0.0).to(query.dtype)
        scores = _scores(query, keys, SCALE, SOFT_CAP, PRECISION)
        visible = owned[None, :] & (index[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (index[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        added = tl.dot(weights.to(query.dtype), values, input_precision=PRECISION)
        weighted = weighted * shrink[:, None] + added
        maximum = new_maximum
    # Infinite where it outweighs every key beyond float32: the result is 0.
    sink = tl.load(sinks_ptr + heads, mask=group_lane < GROUP, other=0.0)
    total += tl.exp2(sink * LOG2E - maximum)
    result = weighted / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + at, result.to(query.dtype), mask=mask)
