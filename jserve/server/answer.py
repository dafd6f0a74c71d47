"""Answers of OpenAI's completions that are not streamed, and what writes their choices.

Refuses to know how a request came about (openai.py, chat.py, completions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from jserve.server.exchange import Serving, while_connected
from jserve.server.logprobs import chat_logprobs
from jserve.server.outputs import finished
from jserve.server.replies import json_response
from jserve.server.usage import usage
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import FinishReason, GenerateRequest, Output


class Shape(Protocol):
    """How one response writes its choices; it may remember what it streamed.

    `full` and `chunk` are the names of its objects. `chunks` are the choices that stream an Output,
    `extra` are top-level fields, taken from the first Output.
    """

    full: str
    chunk: str

    def choice(self, output: Output) -> dict[str, Any]: ...

    def chunks(self, output: Output) -> list[dict[str, Any]]: ...

    def extra(self, first: Output) -> dict[str, Any]: ...


async def answer(
    request: Request,
    serving: Serving,
    asked: Sequence[GenerateRequest],
    shape: Shape,
    head: dict[str, Any],
) -> Response:
    """`head` and the finished choices of `asked`, which share their sampling parameters."""
    outputs = await while_connected(request.receive, finished(serving.outputs(asked)))
    body = {
        **head,
        "choices": [shape.choice(output) for output in outputs],
        "usage": usage(serving, outputs, asked[0].sampling.n),
        "metadata": {"weight_version": "default"},
        **shape.extra(outputs[0]),
    }
    return json_response(body)


def chat_choice(output: Output, tokenizer: Tokenizer, return_token_ids: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text}
    message |= {"reasoning_content": None, "tool_calls": None}
    logprobs = output.output_logprobs
    reason, matched = finish(output.finish)
    choice = {
        "index": output.index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(tokenizer, logprobs, 0),
        "finish_reason": reason,
        "matched_stop": matched,
        **abort_message(output.finish),
    }
    if return_token_ids:
        choice["token_ids"] = output.output_ids
    return choice


def finish(reason: FinishReason | None) -> tuple[str | None, int | str | None]:
    """OpenAI's finish_reason and SGLang's matched_stop."""
    return (None, None) if reason is None else (reason.type, reason.matched)


def abort_message(reason: FinishReason | None) -> dict[str, str]:
    """Why an answer is not whole, as a field of its choice; others do not have it."""
    if reason is None or reason.type != "abort":
        return {}
    return {"abort_message": reason.message or ""}
