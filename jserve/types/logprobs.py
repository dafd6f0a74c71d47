"""Log-probabilities: which ones a request wants, and those of consecutive positions."""

from __future__ import annotations

import msgspec

from jserve.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 32


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What log-probabilities a request wants. `start_len` −1: of output tokens only; ≥ 0: of prompt
    tokens from there too."""

    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] = ()

    def meant(self, max_new_tokens: int | None) -> LogprobParams:
        """Where no output is asked for, those of the prompt are meant."""
        if max_new_tokens == 0 and self.start_len < 0:
            return msgspec.structs.replace(self, start_len=0)
        return self

    def verify(self, prompt_length: int, vocab_size: int) -> None:
        """Raise RequestError naming the first field, as the API calls it, that is out of range."""
        ids = self.token_ids
        known = len(ids) <= MAX_LOGPROB_IDS and all(0 <= token < vocab_size for token in ids)
        rules = (
            ("logprob_start_len", -1 <= self.start_len <= prompt_length, f"[-1, {prompt_length}]"),
            ("top_logprobs_num", 0 <= self.top_num <= MAX_TOP_LOGPROBS, f"[0, {MAX_TOP_LOGPROBS}]"),
        )
        for name, holds, bounds in rules:
            if not holds:
                raise RequestError(f"{name} must be in {bounds}.", name)
        if not known:
            name = "token_ids_logprob"
            rule = f"at most {MAX_LOGPROB_IDS} ids in [0, {vocab_size})"
            raise RequestError(f"{name} must be {rule}.", name)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities of consecutive positions. `values[i]` is None where there is no
    distribution (first prompt token).

    `top[i]` holds top_num (logprob, id) pairs, best first; `ids[i]` one logprob for each asked
    token id. Both are empty lists when they were not asked for, and None at a position without a
    distribution.
    """

    token_ids: list[int]
    values: list[float | None]
    top: list[list[tuple[float, int]] | None] = []
    ids: list[list[float] | None] = []

    def extend(self, later: TokenLogprobs) -> None:
        """Append the positions that follow."""
        self.token_ids.extend(later.token_ids)
        self.values.extend(later.values)
        self.top.extend(later.top)
        self.ids.extend(later.ids)

    def cut(self, length: int) -> None:
        """Keep the first `length` positions."""
        for column in (self.token_ids, self.values, self.top, self.ids):
            del column[length:]

    def first(self, length: int) -> TokenLogprobs:
        """Of at most the first `length` positions; itself if it has no more."""
        if len(self.token_ids) <= length:
            return self
        return TokenLogprobs(
            token_ids=self.token_ids[:length],
            values=self.values[:length],
            top=self.top[:length],
            ids=self.ids[:length],
        )
