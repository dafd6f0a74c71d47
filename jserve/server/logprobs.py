"""Log-probabilities in OpenAI's two shapes: entries of chat choices, lists of text completions.

Knows TokenLogprobs and token texts; nothing of the rest of an answer.
"""

from __future__ import annotations

import codecs
from typing import Any

from jserve.errors import RequestError
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import MAX_TOP_LOGPROBS, LogprobParams, Output, TokenLogprobs

_MIN_LOGPROB = -9999.0  # stands for −inf, which JSON lacks


def check_top(name: str, value: int) -> None:
    """Raise RequestError when field `name` asks for a number of candidates we cannot give."""
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be in [0, {MAX_TOP_LOGPROBS}], got {value}.", name)


def chat_params(logprobs: bool, top_num: int) -> LogprobParams:
    """What a chat's two fields ask for, of which one is set. Raises RequestError."""
    if not logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", "top_logprobs")
    check_top("top_logprobs", top_num)
    return LogprobParams(top_num=top_num)


def chat_logprobs(tokenizer: Tokenizer, logprobs: TokenLogprobs, start: int) -> dict[str, Any]:
    """`logprobs` of one chat choice from position `start` on."""

    def entry(token_id: int, value: float | None) -> dict[str, Any]:
        data = list(tokenizer.id_to_bytes(token_id))
        return {
            "token": tokenizer.id_to_text(token_id),
            "bytes": data,
            "logprob": _finite(value),
        }

    content = []
    for at in range(start, len(logprobs.token_ids)):
        token_id, value = logprobs.token_ids[at], logprobs.values[at]
        chosen = entry(token_id, value)
        # The chosen token has one value, whichever list it is read from.
        chosen["top_logprobs"] = [
            entry(one, value if one == token_id else other)
            for other, one in (logprobs.top[at] if logprobs.top else None) or []
        ]
        content.append(chosen)
    return {"content": content}


class CompletionLogprobs:
    """OpenAI's legacy logprobs of one choice; `text_offset` counts characters of its text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._input_done = False
        self._seen = 0

    def write(self, output: Output) -> dict[str, list[Any]] | None:
        """What is new since the last call; the prompt's part comes with the first."""
        if output.output_logprobs is None and output.input_logprobs is None:
            return None
        lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if output.input_logprobs is not None and not self._input_done:
            self._input_done = True
            self._extend(lists, output.input_logprobs, 0)
        if output.output_logprobs is not None:
            self._extend(lists, output.output_logprobs, self._seen)
            self._seen = len(output.output_logprobs.token_ids)
        return lists

    def _extend(self, lists: dict[str, list[Any]], logprobs: TokenLogprobs, start: int) -> None:
        for at in range(start, len(logprobs.token_ids)):
            token_id, value = logprobs.token_ids[at], logprobs.values[at]
            name = self._name(token_id)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(None if value is None else _finite(value))
            lists["text_offset"].append(self._offset)
            (piece,) = self._tokenizer.pieces([token_id], self._skip_special_tokens)
            self._offset += len(self._decoder.decode(piece))
            if value is None:
                lists["top_logprobs"].append(None)
                continue
            best = {}
            for other, one in (logprobs.top[at] if logprobs.top else None) or []:
                if one != token_id:
                    best.setdefault(self._name(one), _finite(other))
            lists["top_logprobs"].append(best | {name: _finite(value)})

    def _name(self, token_id: int) -> str:
        """A token's text, or its bytes when they are no whole characters."""
        text = self._tokenizer.id_to_text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self._tokenizer.id_to_bytes(token_id))


def _finite(value: float | None) -> float:
    return _MIN_LOGPROB if value is None else max(value, _MIN_LOGPROB)
