"""Text completions: prompts of text or ids; choices and echo.

Refuses to know transport (exchange.py) and what it shares with chat completions (openai.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jserve.engine.engine import Engine
from jserve.errors import RequestError
from jserve.server import openai
from jserve.server.answer import abort_message, finish
from jserve.server.bodies import CompletionBody
from jserve.server.exchange import Serving, origin
from jserve.server.ids import check_ids
from jserve.server.logprobs import CompletionLogprobs, check_top
from jserve.server.protocol import decode
from jserve.server.sequences import check_count
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import LogprobParams, Output


class CompletionRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: Request) -> Response:
        asked = functools.partial(self._asked, self._serving.engine, origin(request))
        return await openai.respond(request, self._serving, asked)

    def _asked(self, engine: Engine, begun: Mapping[str, Any], raw: bytes) -> openai.Asked:
        body = decode(raw, CompletionBody)
        openai.check_model(self._serving, body.model)
        if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
            message = f"max_tokens must be >= 1, or 0 with echo, got {body.max_tokens}."
            raise RequestError(message, "max_tokens")
        if body.best_of not in (None, body.n):
            raise RequestError("best_of other than n is not supported yet.", "best_of")
        logprobs = None
        if body.logprobs is not None:
            check_top("logprobs", body.logprobs)
            start = 0 if body.echo else -1
            logprobs = LogprobParams(start_len=start, top_num=body.logprobs)
        sampling = openai.sampling(body, body.max_tokens, {})
        prompts = _prompts(body.prompt, body.n, engine.model_config.vocab_size)
        requests = openai.requests(body, prompts, sampling, logprobs, begun)
        return body, requests, CompletionShape(body, engine.tokenizer, prompts)


def _prompts(prompt: str | list[Any], n: int, vocab_size: int) -> Sequence[str | list[int]]:
    """One text, a list of texts, one list of ids, or a list of those; `n` answers to each."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(
            "prompt must be a text, token ids, or a non-empty list of those.", "prompt"
        )
    kinds = {type(one) for one in prompt}
    if kinds != {int}:
        check_count(len(prompt), len(prompt) * n, "prompt")
    if kinds == {str}:
        return prompt
    if kinds == {int}:
        return [check_ids("prompt", prompt, vocab_size)]
    if kinds == {list}:
        return [check_ids(f"prompt[{i}]", ids, vocab_size) for i, ids in enumerate(prompt)]
    raise RequestError("prompt must not mix texts, token ids and lists.", "prompt")


class CompletionShape:
    """Choices of text completions. In a stream: text chunks, the last with the finish reason."""

    full = chunk = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        tokenizer: Tokenizer,
        prompts: Sequence[str | list[int]],
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def extra(self, first: Output) -> dict[str, Any]:
        return {}

    def choice(self, output: Output) -> dict[str, Any]:
        return self._choice(output, output.text, output.output_ids)

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        wanted = output.new_ids and (output.output_logprobs or self._body.return_token_ids)
        if output.delta or output.finish is not None or wanted:
            return [self._choice(output, output.delta, output.new_ids)]
        return []

    def _choice(self, output: Output, text: str, token_ids: list[int]) -> dict[str, Any]:
        index, first = output.index, output.index not in self._logprobs
        if first:
            self._logprobs[index] = CompletionLogprobs(
                self._tokenizer, self._body.skip_special_tokens
            )
        if first and self._body.echo:
            prompt = self._prompts[index // self._body.n]
            text = (prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)) + text
        reason, matched = finish(output.finish)
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].write(output),
            "finish_reason": reason,
            "matched_stop": matched,
            **abort_message(output.finish),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_ids if first else None
        return choice
