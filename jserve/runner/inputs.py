"""Host side of a step: a plan padded to its bucket and packed into one int32 array, one upload.

Pure numpy. Every `split` names the sections of a packed array and works alike on numpy (as views to
fill) and on device arrays (as slices to read), so that the layout is written once. Arrays are fresh
each time: the device may read the very memory, later.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jserve.plan import Kind, SlotEdit, StepPlan
from jserve.types import MAX_LOGIT_BIAS, MAX_LOGPROB_IDS, MAX_STOP_TOKEN_IDS


class StepFields(NamedTuple):
    """Sections of a step's upload; padding rows, of sampling fields too, name the trash slot."""

    distribution: Any  # [2] leading rows of one token, real rows
    cu_q_lens: Any  # [R + 1]
    slots: Any  # [R]
    kv_lens: Any  # [R]
    sample_tokens: Any  # [N] the token whose hidden state is wanted
    sample_slots: Any  # [N]
    sample_index: Any  # [N]
    token_ids: Any  # [T]
    new_pages: Any  # [T · (1 + groups)]
    num_real: Any  # [D] tokens of each data-parallel rank; by pack, as many as of this one


@dataclasses.dataclass(frozen=True, slots=True)
class StepLayout:
    """Upload of a forward program: R rows, T tokens; N = num_slots rows at most sample."""

    rows: int
    tokens: int
    num_slots: int
    num_groups: int = 0
    num_ranks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        rows, tokens, slots = self.rows, self.tokens, self.num_slots
        pages = tokens * (1 + self.num_groups)
        return (2, rows + 1, rows, rows, slots, slots, slots, tokens, pages, self.num_ranks)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def split(self, packed: Any) -> StepFields:
        return StepFields(*_split(packed, self.sizes))

    def pack(self, plan: StepPlan) -> np.ndarray:
        num_rows, num_tokens = len(plan.slots), plan.num_tokens
        fits = num_rows <= self.rows and num_tokens <= self.tokens
        assert fits, f"{num_rows=} {num_tokens=} {self=}"
        # Packing would cast a wrong dtype silently, before a Compiled program could refuse it.
        arrays = (plan.slots, plan.q_lens, plan.kv_lens, plan.output_index, plan.token_ids)
        new_pages = (plan.new_pages, *plan.group_new_pages)
        assert len(new_pages) == 1 + self.num_groups, f"{len(new_pages)=} {self=}"
        dtypes = [array.dtype for array in (*arrays, *new_pages)]
        assert all(dtype == np.int32 for dtype in dtypes), f"{dtypes=}"
        assert plan.samples.dtype == np.bool_, f"{plan.samples.dtype=}"
        packed = np.zeros(self.size, np.int32)
        fields = self.split(packed)
        ends = np.cumsum(plan.q_lens)
        assert ends[-1] == num_tokens, f"{ends[-1]=} {num_tokens=}"
        leading = num_rows if plan.kind is Kind.DECODE else plan.num_decode_rows
        fields.distribution[:] = (leading, num_rows)
        fields.cu_q_lens[1 : num_rows + 1] = ends
        fields.cu_q_lens[num_rows + 1 :] = fields.num_real[:] = num_tokens
        fields.slots[:] = fields.sample_slots[:] = self.num_slots
        fields.slots[:num_rows] = plan.slots
        fields.kv_lens[:num_rows] = plan.kv_lens
        sampling = np.flatnonzero(plan.samples)
        fields.sample_tokens[: len(sampling)] = ends[sampling] - 1
        fields.sample_slots[: len(sampling)] = plan.slots[sampling]
        fields.sample_index[: len(sampling)] = plan.output_index[sampling]
        fields.token_ids[:num_tokens] = plan.token_ids
        fields.new_pages.reshape(-1, self.tokens)[:, :num_tokens] = new_pages
        return packed


class EditFields(NamedTuple):
    """Columns of an edit upload, one row an edited slot; floats travel as their bits."""

    slot: Any  # [E, 1] trash slot for padding
    seed: Any  # [E, 2]
    floats: Any  # [E, 6] in the order of batch.TEMPERATURE …
    ints: Any  # [E, 2]
    stop_ids: Any
    bias_ids: Any
    bias_values: Any
    logprob_ids: Any
    pages: Any  # [E, P · (1 + groups)]


@dataclasses.dataclass(frozen=True, slots=True)
class EditLayout:
    """Upload of the edit program: E = `rows` slots at a time, P = `pages` a slot."""

    rows: int
    pages: int
    num_slots: int
    vocab: int
    num_groups: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        lists = (MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_LOGPROB_IDS)
        return (1, 2, 6, 2, *lists, self.pages * (1 + self.num_groups))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, sum(self.widths)

    def split(self, packed: Any) -> EditFields:
        return EditFields(*_split(packed, self.widths, columns=True))

    def pack(self, edits: Sequence[SlotEdit]) -> Iterator[np.ndarray]:
        """One upload for each `rows` edits."""
        for first in range(0, len(edits), self.rows):
            packed = np.zeros(self.shape, np.int32)
            fields = self.split(packed)
            fields.slot[:] = self.num_slots
            for row, edit in enumerate(edits[first : first + self.rows]):
                self._fill(EditFields(*(field[row] for field in fields)), edit)
            yield packed

    def _fill(self, row: EditFields, edit: SlotEdit) -> None:
        s = edit.sampling
        row.slot[0] = edit.slot
        row.seed[:] = np.array([s.seed], ">i8").view(">i4")  # high word, low word
        penalties = (s.frequency_penalty, s.presence_penalty, s.repetition_penalty)
        floats = np.array((s.temperature, s.top_p, s.min_p, *penalties), np.float32)
        row.floats[:] = floats.view(np.int32)
        row.ints[:] = (s.top_k, s.min_new_tokens)
        _fill_ids(row.stop_ids, s.stop_ids, self.vocab)
        _fill_ids(row.bias_ids, s.bias_ids, self.vocab)
        row.bias_values[: len(s.bias_values)] = np.array(s.bias_values, np.float32).view(np.int32)
        row.logprob_ids[: len(s.logprob_ids)] = s.logprob_ids
        tables = row.pages.reshape(-1, self.pages)
        tables[:, : len(edit.pages)] = (edit.pages, *edit.group_pages)


def _split(packed: Any, sizes: Sequence[int], columns: bool = False) -> list[Any]:
    bounds = np.cumsum([0, *sizes]).tolist()
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    return [packed[:, part] if columns else packed[part] for part in parts]


def _fill_ids(row: np.ndarray, ids: Sequence[int], vocab: int) -> None:
    """Distinct ids, then distinct ids that no token has."""
    row[:] = vocab + np.arange(len(row))
    distinct = tuple(dict.fromkeys(ids))
    row[: len(distinct)] = distinct
