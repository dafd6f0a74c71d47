"""Token ids → text of one running request, piece by piece. Owns what may already be shown: never
part of a character, never text that may turn out to begin a stop. Work per token does not depend on
how much text there is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jserve.tokenizer.hidden_specials import stops_of
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import SamplingParams


class Detokenizer:
    """The text of one sequence: what `push` and `finish` return, joined.

    Without a stop it equals the decoding of all ids as the continuation of a prompt (a leading
    blank stays).
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = sampling.skip_special_tokens
        self._trim = not sampling.no_stop_trim
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._filter = stops_of(sampling) if sampling.stop or sampling.stop_regex else None
        eos_token_ids = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._ends = frozenset((*eos_token_ids, *sampling.stop_token_ids))
        self._last: list[int] = []  # a last token that ends the text if the engine says so
        self._num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string found, or the pattern of the stop regex; nothing is returned after it."""
        return None if self._filter is None else self._filter.stopped

    @property
    def num_tokens_used(self) -> int:
        """Tokens pushed, up to the one that completed the stop."""
        return self._num_tokens + (0 if self.stopped is not None else len(self._last))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now safe to show. "" once stopped."""
        if self.stopped is not None or not token_ids:
            return ""
        ready = [*self._last, *token_ids]
        self._last = [ready.pop()] if ready[-1] in self._ends else []
        return self._decode(ready)

    def finish(self, stop_token: bool) -> str:
        """The rest of the text. `stop_token`: the last token ended the generation, and is trimmed
        like a stop string, which it may complete.
        """
        new = ""
        if self.stopped is None:
            last, self._last = self._last, []
            new = self._decode(last, hide=stop_token and self._trim)
        if self.stopped is None:
            rest = self._decoder.decode(b"", final=True)
            new += rest if self._filter is None else self._filter.finish(rest)
        return new

    def _decode(self, ids: Sequence[int], hide: bool = False) -> str:
        pieces = [b""] * len(ids) if hide else self._tokenizer.pieces(ids, self._skip_special)
        if self._filter is None:
            self._num_tokens += len(pieces)
            return self._decoder.decode(b"".join(pieces))
        new = []
        for token, piece in zip(ids, pieces, strict=True):  # which one completes a stop?
            self._num_tokens += 1
            hidden = "" if piece else self._tokenizer.id_to_text(token)
            new.append(self._filter.feed(self._decoder.decode(piece), hidden))
            if self.stopped is not None:
                break
        return "".join(new)
