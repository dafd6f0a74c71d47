"""A memory that obeys plans alone and remembers what each page holds: (position, token, namespace).

A launch is legal when each token that it writes has a place that its request owns, and when every
position that its rows attend to (all below kv_len) holds that request's token, written by this
launch or an earlier one. What a request's tokens are is its script, known from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from cache_model import Held

from jserve.cache.manager import Lease
from jserve.cache.radix import Namespace
from jserve.plan import Kind, SampledLogprobs, ScoreOutcome, StepOutcome, StepPlan
from jserve.scheduler.request import Row
from jserve.types import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS, Submit

VOCAB = 32
EOS = 7
Cell = tuple[int, int, Namespace]


@dataclasses.dataclass(slots=True, eq=False)
class Script:
    """One request: its prompt, and what it draws at each output index, launched or not."""

    submit: Submit
    order: int

    @property
    def namespace(self) -> Namespace:
        return self.submit.extra_key, self.submit.cache_salt

    def token(self, position: int) -> int:
        prompt = self.submit.prompt_ids
        return prompt[position] if position < len(prompt) else self.drawn(position - len(prompt))

    def drawn(self, index: int) -> int:
        """Few different outputs, so that they are shared too; now and then the end."""
        return EOS if (5 * self.order + 3 * index) % 37 == 36 else (self.order % 3 + index) % 5

    def outputs(self) -> list[int]:
        """What it answers when nothing comes between."""
        limit = self.submit.sampling.max_new_tokens
        assert limit is not None, "a script needs a limit"
        tokens = [self.drawn(index) for index in range(limit)]
        if self.submit.sampling.ignore_eos or EOS not in tokens:
            return tokens
        return tokens[: tokens.index(EOS) + 1]

    @property
    def match_limit(self) -> int:
        """Tokens of the prompt that may come from the cache at the first admission."""
        wanted, most = self.submit.logprobs, len(self.submit.prompt_ids) - 1
        return most if wanted is None or wanted.start_len < 0 else min(most, wanted.start_len)


@dataclasses.dataclass(slots=True)
class Slot:
    script: Script
    table: list[int]
    length: int  # tokens with KV
    drawn: int  # output tokens that the device has drawn
    last: int = -1


class ShadowMemory:
    """Launches in order. `scripts`: by rid, shared with whoever submits."""

    def __init__(self, page_size: int, scripts: dict[str, Script]) -> None:
        self.page_size = page_size
        self.scripts = scripts
        self.cells: dict[tuple[int, int], Cell] = {}  # (page, place in it)
        self.slots: dict[int, Slot] = {}
        self.reads = self.writes = 0

    def launch(self, plan: StepPlan, leases: Mapping[Lease, Held]) -> StepOutcome:
        """Raise AssertionError unless `plan` is legal; → what its rows draw.

        Args:
            leases: the model's record of every live lease, by lease.
        """
        rows = [row for row in plan.rows if isinstance(row, Row)]
        self._check_shape(plan, rows)
        begun = {row.slot: self.scripts[row.request.rid] for row in rows}
        for edit in plan.edits:
            script, length = begun[edit.slot], len(edit.pages) * self.page_size
            assert edit.output_ids.tolist() == script.outputs()[: len(edit.output_ids)]
            if not len(edit.output_ids):
                assert length <= script.match_limit, f"{length=} {script.match_limit=}"
            table, drawn = edit.pages.tolist(), len(edit.output_ids)
            self.slots[edit.slot] = Slot(script, table, length, drawn)
        users: dict[int, list[Held]] = {}
        for held in leases.values():
            for page in held.pages:
                users.setdefault(page, []).append(held)
        at = 0
        for r, row in enumerate(rows):
            end = at + int(plan.q_lens[r])
            slot, held = self.slots[row.slot], leases[row.lease]
            assert slot.script is begun[row.slot], "a row without an edit in another's slot"
            for t in range(at, end):
                self._write(slot, int(plan.token_ids[t]), int(plan.new_pages[t]), held, users)
            assert slot.length == plan.kv_lens[r], f"{slot.length=} {plan.kv_lens[r]=}"
            assert held.pages == slot.table, "the lease and the device disagree about the pages"
            at = end
        for row in rows:
            self._read(self.slots[row.slot])
        return self._sample(plan, rows)

    def check_cached(self, prefix: tuple[Namespace, tuple[int, ...]], page: int) -> None:
        """The last page of a cached prefix holds exactly its tokens."""
        namespace, tokens = prefix
        begin = len(tokens) - self.page_size
        for i in range(self.page_size):
            expected = (begin + i, tokens[begin + i], namespace)
            held = self.cells.get((page, i))
            assert held == expected, f"cached page {page} holds {held} at {i}, not {expected}"

    def _check_shape(self, plan: StepPlan, rows: list[Row]) -> None:
        assert 0 < len(rows) == len(plan.rows) == len(set(plan.slots.tolist()))
        assert [row.slot for row in rows] == plan.slots.tolist()
        assert all(row.alive for row in rows), "a plan has a row whose stay is over"
        assert int(plan.q_lens.sum()) == plan.num_tokens == len(plan.new_pages)
        assert (plan.kind is Kind.DECODE) == bool((plan.q_lens == 1).all())
        assert (plan.token_ids[: plan.num_decode_rows] == -1).all()

    def _write(
        self, slot: Slot, token: int, new_page: int, held: Held, users: dict[int, list[Held]]
    ) -> None:
        position, place = slot.length, slot.length % self.page_size
        assert bool(new_page) == (place == 0), f"{position=} {new_page=}"
        if new_page:
            slot.table.append(new_page)
        page = slot.table[position // self.page_size]
        token = slot.last if token == -1 else token
        assert token == slot.script.token(position), f"{position=}: input {token}"
        assert page > 0 and users[page] == [held], f"page {page} is not the row's own"
        self.cells[page, place] = (position, token, slot.script.namespace)
        slot.length += 1
        self.writes += 1

    def _read(self, slot: Slot) -> None:
        script, namespace = slot.script, slot.script.namespace
        assert len(set(slot.table)) == len(slot.table), f"a page twice in {slot.table}"
        for position in range(slot.length):
            page, place = slot.table[position // self.page_size], position % self.page_size
            expected = (position, script.token(position), namespace)
            held = self.cells.get((page, place))
            assert held == expected, f"page {page} holds {held} at {place}, not {expected}"
        self.reads += slot.length

    def _sample(self, plan: StepPlan, rows: list[Row]) -> StepOutcome:
        tokens = []
        for r in np.flatnonzero(plan.samples).tolist():
            slot = self.slots[rows[r].slot]
            assert plan.output_index[r] == slot.drawn
            assert slot.length == len(slot.script.submit.prompt_ids) + slot.drawn, "not its turn"
            slot.last = slot.script.drawn(slot.drawn)
            slot.drawn += 1
            tokens.append(slot.last)
        n, logprobs, score = len(tokens), None, None
        if plan.logprobs:
            logprobs = SampledLogprobs(
                np.array(tokens, np.float32),
                np.zeros((n, MAX_TOP_LOGPROBS), np.float32),
                np.zeros((n, MAX_TOP_LOGPROBS), np.int32),
                np.zeros((n, MAX_LOGPROB_IDS), np.float32),
            )
        if plan.score is not None:  # the log-probability of a token is its id
            score = ScoreOutcome(plan.score.targets.astype(np.float32), None, None, None)
        return StepOutcome(np.array(tokens, np.int32), logprobs, score)
