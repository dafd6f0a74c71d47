"""How many tokens of an answer are thoughts: of those requests that must reason, as they come.

Knows texts, as parsers/reasoning does that splits them; nothing of grammars.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from jserve.engine.reasoner import prompt_begun
from jserve.parsers.reasoning import FORMATS, Format
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import GenerateRequest, Output

Outputs = AsyncGenerator[Output, None]


class Thoughts:
    """`name`: of a format, as --reasoning-parser takes it."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self._format, self._tokenizer = FORMATS[name], tokenizer

    async def counted(self, outputs: Outputs, requests: Sequence[GenerateRequest]) -> Outputs:
        """The `outputs` of `requests`, with their reasoning_tokens set."""
        reasons = [one.require_reasoning for one in requests for _ in range(one.sampling.n)]
        counts: dict[int, _Count] = {}  # by index
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if reasons[output.index]:
                    count = counts.get(output.index)
                    if count is None:
                        count = counts[output.index] = self._begin(output.prompt_ids)
                    output.reasoning_tokens = count.push(output.new_ids)
                yield output

    def _begin(self, prompt_ids: list[int]) -> _Count:
        begun = prompt_begun(self._format, self._tokenizer, prompt_ids)
        thinks = self._format.thinks_at_once if begun is None else begun
        return _Count(self._format, self._tokenizer, thinks, over=begun is False)


class _Count:
    """Of one sequence: the tokens up to and with the tag that ends its thoughts."""

    def __init__(self, form: Format, tokenizer: Tokenizer, thinks: bool, over: bool) -> None:
        self._begin, self._end = form.begin.encode(), form.end.encode()
        self._tokenizer = tokenizer
        self._thinks, self._over = thinks, over
        self._seen = 0  # tokens
        self._text = b""  # that may be part of a tag

    def push(self, token_ids: Sequence[int]) -> int:
        """→ how many there are by now."""
        if not self._over:
            for piece in self._tokenizer.pieces(token_ids, skip_special_tokens=False):
                self._seen += 1
                self._text += piece
                self._look()
                if self._over:
                    break
        return self._seen if self._thinks else 0

    def _look(self) -> None:
        if not self._thinks:
            text = self._text.lstrip()
            self._thinks = text.startswith(self._begin)
            self._over = not self._thinks and not self._begin.startswith(text)
        if self._thinks:
            self._over = self._end in self._text
            self._text = self._text[1 - len(self._end) :]
