"""What one request collects of log-probabilities, of its prompt and of its output, until a Delta
takes them away. A request that wants none has no such record. Knows no page, slot or step.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jserve.plan import SampledLogprobs, ScoreOutcome
from jserve.types import LogprobParams, TokenLogprobs

Top = list[tuple[float, int]] | None
Ids = list[float] | None


@dataclasses.dataclass(slots=True, eq=False)
class Logprobs:
    """`scores` are the prompt's, chunk by chunk; the other lists are of output tokens not sent."""

    wanted: LogprobParams
    prompt: np.ndarray  # int32[·]
    scored: bool = False  # all of the prompt's are there
    _sent: bool = False  # … and a Delta has carried them
    _scores: list[ScoreOutcome] = dataclasses.field(default_factory=list)
    _chosen: list[float | None] = dataclasses.field(default_factory=list)
    _top: list[Top] = dataclasses.field(default_factory=list)
    _ids: list[Ids] = dataclasses.field(default_factory=list)

    @property
    def score_from(self) -> int | None:
        """First prompt token whose log-probability is wanted, as long as some are missing."""
        return None if self.scored or self.wanted.start_len < 0 else self.wanted.start_len

    @property
    def wants_top(self) -> bool:
        """Whether more than the chosen token's log-probability is wanted at each position."""
        return self.wanted.top_num > 0 or bool(self.wanted.token_ids)

    def add(self, sampled: SampledLogprobs, index: int) -> None:
        """Keep those of one output token, entry `index` of a step's."""
        wanted, value = self.wanted, float(sampled.chosen[index])
        valid = not math.isnan(value)
        self._chosen.append(value if valid else None)
        if wanted.top_num:
            pairs = _pairs(sampled.top_values[index], sampled.top_ids[index], wanted.top_num)
            self._top.append(pairs if valid else None)
        if wanted.token_ids:
            ids = sampled.id_values[index, : len(wanted.token_ids)].tolist()
            self._ids.append(ids if valid else None)

    def add_scores(self, part: ScoreOutcome) -> None:
        """Keep those of the next prompt tokens."""
        self._scores.append(part)

    def restart(self) -> None:
        """The prompt will be computed again from its start; forget what is not whole."""
        if not self.scored:
            self._scores.clear()

    def take(self, token_ids: list[int]) -> TokenLogprobs:
        """Those of `token_ids`, the output tokens since the last call."""
        taken = TokenLogprobs(
            token_ids=token_ids, values=self._chosen, top=self._top, ids=self._ids
        )
        self._chosen, self._top, self._ids = [], [], []
        return taken

    def take_scores(self) -> TokenLogprobs | None:
        """The prompt's, once; None while chunks of them are missing."""
        wanted = self.wanted
        if wanted.start_len < 0 or not self.scored or self._sent:
            return None
        self._sent = True
        head: list[None] = [None] if wanted.start_len == 0 else []
        values: list[float | None] = [*head]
        top: list[Top] = [*head] if wanted.top_num else []
        ids: list[Ids] = [*head] if wanted.token_ids else []
        for part in self._scores:
            values += part.values.tolist()
            if wanted.top_num:
                assert part.top_values is not None and part.top_ids is not None, "no want_top"
                both = zip(part.top_values, part.top_ids, strict=True)
                top += [_pairs(v, t, wanted.top_num) for v, t in both]
            if wanted.token_ids:
                assert part.id_values is not None, "no want_top"
                ids += part.id_values[:, : len(wanted.token_ids)].tolist()
        self._scores.clear()
        tokens = self.prompt[wanted.start_len :].tolist()
        return TokenLogprobs(token_ids=tokens, values=values, top=top, ids=ids)


def _pairs(values: np.ndarray, ids: np.ndarray, n: int) -> list[tuple[float, int]]:
    return list(zip(values[:n].tolist(), ids[:n].tolist(), strict=True))
