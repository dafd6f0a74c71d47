"""Which tokens a grammar forces next, as the model's own tokenizer writes them.

The text that must come is tokenized behind the last token. Where the two would have become one
token, the run is tokenized alone: what was generated stays as it is. The run's last token is left
to be drawn, because the text that follows it may belong to the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jserve.grammar.constraint import Constraint
from jserve.grammar.masks import Constrained

MIN_RUN = 4  # tokens; the step that computes a shorter run costs more than drawing it


class Tokens(Protocol):
    """Of the model's tokenizer."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def pieces(self, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]: ...


class JumpForward:
    """Args:
    append: gives a request tokens that are not drawn.
    """

    def __init__(self, tokens: Tokens, append: Callable[[Any, list[int]], None]) -> None:
        self._tokens, self._append = tokens, append

    def __call__(self, request: Constrained, constraint: Constraint) -> None:
        if request.submit.logprobs is not None:
            return  # a forced token has none
        forced = constraint.matcher.forced()
        if len(forced) < MIN_RUN:
            return
        run = self._run(request.output_ids, forced)[:-1]
        if len(run) >= MIN_RUN:
            self._append(request, run)

    def _run(self, output_ids: Sequence[int], forced: bytes) -> list[int]:
        before = list(output_ids[-1:])
        joined = self._encoded(b"".join(self._tokens.pieces(before, True)) + forced)
        if joined[: len(before)] == before:
            return joined[len(before) :]
        return self._encoded(forced)

    def _encoded(self, data: bytes) -> list[int]:
        """Its tokens; [] where they would not give the same bytes back."""
        try:
            ids = self._tokens.encode(data.decode(), add_special=False)
        except UnicodeDecodeError:
            return []
        return ids if b"".join(self._tokens.pieces(ids, True)) == data else []
