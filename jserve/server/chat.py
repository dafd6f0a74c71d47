"""Chat completions: messages through the chat template; choices and deltas of answers.

Refuses to know transport (exchange.py) and what it shares with text completions (openai.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jserve.engine.engine import Engine
from jserve.server import openai
from jserve.server.answer import abort_message, chat_choice
from jserve.server.bodies import ChatBody, Message, TokenizeBody
from jserve.server.exchange import Serving, origin
from jserve.server.ids import check_ids
from jserve.server.logprobs import chat_logprobs, chat_params
from jserve.server.parts import joined_text
from jserve.server.protocol import convert, decode
from jserve.server.thinking import Think
from jserve.server.unusable import RESERVED, bad_limit, bad_message, unusable
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Output


class ChatRoutes:
    def __init__(self, serving: Serving, think: Think = lambda _, *given: given) -> None:
        self._serving, self._think = serving, think

    async def chat(self, request: Request) -> Response:
        asked = functools.partial(self._asked, self._serving.engine, origin(request))
        return await openai.respond(request, self._serving, asked)

    def _asked(self, engine: Engine, begun: Mapping[str, Any], raw: bytes) -> openai.Asked:
        body = decode(raw, ChatBody)
        openai.check_model(self._serving, body.model)
        wanted = body.logprobs or body.top_logprobs
        logprobs = chat_params(body.logprobs, body.top_logprobs or 0) if wanted else None
        sampling = openai.sampling(body, _max_tokens(body), engine.sampling_defaults)
        if body.input_ids is None:
            ids = prompt_ids(engine.tokenizer, body)
        else:
            ids = check_ids("input_ids", body.input_ids, engine.model_config.vocab_size)
        asked = openai.requests(body, [ids], sampling, logprobs, begun)
        return body, *self._think(body, asked, ChatShape(body, engine.tokenizer))


def prompt_ids(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, begin_answer: bool = True
) -> list[int]:
    """Its messages through the chat template. Raises RequestError."""
    messages = [_template_message(one, f"messages[{i}]") for i, one in enumerate(body.messages)]
    variables, continued = body.chat_template_kwargs, body.continue_final_message
    taken, last = RESERVED & variables.keys(), messages[-1]["role"] if messages else ""
    if not messages or taken or (continued and last != "assistant"):
        raise unusable(messages, taken)
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=begin_answer and not continued,
        continue_final_message=continued,
        **variables,
    )


def _template_message(fields: dict[str, Any], at: str) -> dict[str, Any]:
    """A checked message as the template sees it; a developer message is a system message."""
    message = convert(fields, Message, at)
    role, content = message.role, message.content
    if role in ("tool", "function") or (content is None and role != "assistant"):
        raise bad_message(role, at)
    if isinstance(content, list):
        content = joined_text(content, f"{at}.content")
    rendered = {"role": "system" if role == "developer" else role, "content": content or ""}
    optional = {"name": message.name, "reasoning_content": message.reasoning_content}
    return rendered | {key: value for key, value in optional.items() if value is not None}


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    limit = old if new is None else new
    if (limit is not None and limit < 1) or old not in (None, limit):
        raise bad_limit(old, new)
    return limit


class ChatShape:
    """Choices of chat completions. In a stream: a role chunk, deltas, a finish chunk."""

    full = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._seen: dict[int, int] = {}  # logprob positions streamed, by choice index

    def extra(self, first: Output) -> dict[str, Any]:
        if self._body.return_prompt_token_ids or self._body.return_token_ids:
            return {"prompt_token_ids": first.prompt_ids}
        return {}

    def choice(self, output: Output) -> dict[str, Any]:
        return chat_choice(output, self._tokenizer, self._body.return_token_ids)

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        index, chunks = output.index, []
        if index not in self._seen:
            self._seen[index] = 0
            first = _chunk(index, {"role": "assistant", "content": ""})
            chunks.append(first | self.extra(output))
        wanted = output.new_ids and (self._body.logprobs or self._body.return_token_ids)
        if output.delta or wanted:
            chunk = _chunk(index, {"content": output.delta})
            if self._body.logprobs and (logprobs := output.output_logprobs) is not None:
                chunk["logprobs"] = chat_logprobs(self._tokenizer, logprobs, self._seen[index])
                self._seen[index] = len(logprobs.token_ids)
            if self._body.return_token_ids:
                chunk["token_ids"] = output.new_ids
            chunks.append(chunk)
        if output.finish is not None:
            reason = {"finish_reason": output.finish.type, "matched_stop": output.finish.matched}
            why = {} if output.finish.type != "abort" else abort_message(output.finish)
            chunks.append(_chunk(index, {}) | reason | why)
        return chunks


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
