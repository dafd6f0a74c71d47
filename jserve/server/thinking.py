"""Chats with a model that thinks before it answers: the flag --reasoning-parser.

Owns which of them think, and how choices tell thoughts from answers. Refuses to know how tags are
found in a text (parsers/reasoning) and what else a choice holds (chat.py).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from jserve.engine.grammars import FIELDS
from jserve.engine.reasoner import prompt_begun
from jserve.parsers.reasoning import FORMATS, Format, Splitter, split
from jserve.server.answer import Shape
from jserve.server.bodies import ChatBody
from jserve.server.exchange import Serving
from jserve.types import GenerateRequest, Output

_Chunk = dict[str, Any]
_Asked = list[GenerateRequest]
#: What makes of a chat, its requests and their shape those that think.
Think = Callable[[ChatBody, _Asked, Shape], tuple[_Asked, Shape]]


def thinking(serving: Serving) -> tuple[Thinking] | tuple[()]:
    """What ChatRoutes take beside `serving`."""
    name = serving.config.server.reasoning_parser
    return () if name is None else (Thinking(serving, FORMATS[name]),)


class Thinking:
    """A Think by the flag. Whether a chat thinks is its prompt's to say, then the switch of its
    chat template; a message that is continued is an answer already.
    """

    def __init__(self, serving: Serving, form: Format) -> None:
        self._serving, self._format = serving, form

    def __call__(self, body: ChatBody, asked: _Asked, shape: Shape) -> tuple[_Asked, Shape]:
        prompt, tokenizer = asked[0].input_ids or [], self._serving.engine.tokenizer
        thinks = begun = prompt_begun(self._format, tokenizer, prompt)
        if begun is None:
            switched_on = self._format.thinks(body.chat_template_kwargs)
            thinks = switched_on and not body.continue_final_message
        asked = [msgspec.structs.replace(one, require_reasoning=bool(thinks)) for one in asked]
        if not body.separate_reasoning:
            return asked, shape
        bound = any(getattr(asked[0].sampling, field) for field in FIELDS.values())
        splitter = functools.partial(
            Splitter,
            bool(begun or (thinks and self._format.thinks_at_once)),
            verbatim=bound,  # blanks may be part of its syntax
            in_one_piece=not body.stream_reasoning,
        )
        return asked, ThinkingShape(shape, splitter)


class ThinkingShape:
    """The choices of `shape`, thoughts told from answers. In a stream those come first."""

    def __init__(self, shape: Shape, splitter: Callable[[], Splitter]) -> None:
        self.full, self.chunk, self.extra = shape.full, shape.chunk, shape.extra
        self._shape, self._new = shape, splitter
        self._splitters: dict[int, Splitter] = collections.defaultdict(splitter)

    def choice(self, output: Output) -> _Chunk:
        choice = self._shape.choice(output)
        reasoning, answer = split(output.text, self._new())
        parts = {"content": answer, "reasoning_content": reasoning or None}
        return choice | {"message": choice["message"] | parts}

    def chunks(self, output: Output) -> list[_Chunk]:
        return [part for chunk in self._shape.chunks(output) for part in self._parts(chunk)]

    def _parts(self, chunk: _Chunk) -> list[_Chunk]:
        """A chunk as those that stream what is certain by now. The first has its logprobs."""
        splitter, delta = self._splitters[chunk["index"]], chunk["delta"]
        bare = {"index": chunk["index"], "logprobs": None, "finish_reason": None}
        if chunk["finish_reason"] is not None:
            return [*(bare | {"delta": one} for one in _deltas(*splitter.finish())), chunk]
        if "role" in delta:
            return [chunk]
        deltas = _deltas(*splitter.push(delta["content"]))
        if not deltas and (chunk["logprobs"] is not None or "token_ids" in chunk):
            deltas = [{"content": ""}]
        return [(bare if i else chunk) | {"delta": one} for i, one in enumerate(deltas)]


def _deltas(reasoning: str, answer: str) -> list[dict[str, str]]:
    named = {"reasoning_content": reasoning, "content": answer}
    return [{name: text} for name, text in named.items() if text]
