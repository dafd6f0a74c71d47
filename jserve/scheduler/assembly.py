"""From the rows of a step to the arrays of its StepPlan. Decides nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.plan import Kind, Score, StepPlan
from jserve.scheduler.roster import SlotTable
from jserve.scheduler.rows import Chunk, DecodeRows


def assemble(
    step: int,
    decode: DecodeRows,
    chunks: Sequence[Chunk],
    score: Score | None,
    table: SlotTable,
    cache: CacheManager,
) -> StepPlan:
    """The plan of a step whose lengths the table has already advanced. All arrays are fresh."""
    n = len(decode.rows)
    q_lens = np.array([1] * n + [c.grant.end - c.grant.begin for c in chunks], np.int32)
    slots = np.concatenate([decode.slots, np.array([c.row.slot for c in chunks], np.int32)])
    samples = np.array([True] * n + [c.samples for c in chunks], bool)
    output_index = np.array([c.output_index for c in chunks], np.int32)
    token_ids = np.full(int(q_lens.sum()), -1, np.int32)
    new_pages = np.zeros(len(token_ids), np.int32)
    new_pages[:n], at = decode.new_pages, n
    for chunk in chunks:
        grant = chunk.grant
        end = at + grant.end - grant.begin
        token_ids[at:end] = chunk.row.tokens[grant.begin : grant.end]
        new_pages[at : end : cache.page_size] = grant.pages  # chunks begin at a page
        at = end
    sampling = slots[samples]
    return StepPlan(
        step=step,
        kind=Kind.DECODE if bool((q_lens == 1).all()) else Kind.MIXED,
        slots=slots,
        q_lens=q_lens,
        kv_lens=table.kv_len[slots],
        samples=samples,
        output_index=np.concatenate([decode.output_index, output_index]),
        num_decode_rows=n,
        token_ids=token_ids,
        new_pages=new_pages,
        group_new_pages=tuple(group.of[new_pages] for group in cache.groups),
        full_sampler=bool(table.full_sampler[sampling].any()),
        logprobs=bool(table.logprobs[sampling].any()),
        constrained=bool(table.constrained[sampling].any()),
        edits=tuple(c.edit for c in chunks if c.edit is not None),
        score=score,
        rows=(*decode.rows, *(c.row for c in chunks)),
    )
