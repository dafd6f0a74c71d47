"""/tokenize and /detokenize, in threads of their own: however much they are given, no request for
an answer waits behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jserve.engine.engine import Engine
from jserve.engine.misfit import too_long
from jserve.errors import RequestError
from jserve.server import openai
from jserve.server.bodies import DetokenizeBody, TokenizeBody
from jserve.server.chat import prompt_ids
from jserve.server.exchange import Serving, made_of_body
from jserve.server.ids import check_ids
from jserve.server.models import context_length
from jserve.server.protocol import decode
from jserve.server.replies import json_response

NUM_THREADS = 2


class TokenRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokens")

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._detokenized)

    async def _answer(
        self, request: Request, answered: Callable[[Engine, bytes], Response]
    ) -> Response:
        make = functools.partial(answered, self._serving.engine)
        return await made_of_body(request, make, self._threads)

    def _tokenized(self, engine: Engine, raw: bytes) -> Response:
        body, tokenizer = decode(raw, TokenizeBody), engine.tokenizer
        openai.check_model(self._serving, body.model)
        limit = context_length(self._serving)
        if (body.prompt is None) == (not body.messages):
            raise RequestError("exactly one of prompt and messages is required.", "prompt")

        def encoded(text: str) -> list[int]:
            if len(text) > 2 * tokenizer.longest_token * limit:  # as engine/submission.py
                raise too_long(text, limit, "prompt")
            return tokenizer.encode(text, body.add_special_tokens)

        if body.prompt is None:
            tokens = prompt_ids(tokenizer, body, body.add_generation_prompt)
            count = len(tokens)
        elif isinstance(body.prompt, str):
            tokens = encoded(body.prompt)
            count = len(tokens)
        else:
            tokens = [encoded(text) for text in body.prompt]
            count = [len(ids) for ids in tokens]
        return json_response({"tokens": tokens, "count": count, "max_model_len": limit})

    def _detokenized(self, engine: Engine, raw: bytes) -> Response:
        body, vocab_size = decode(raw, DetokenizeBody), engine.model_config.vocab_size
        openai.check_model(self._serving, body.model)

        def text(name: str, ids: Sequence[Any]) -> str:
            checked = check_ids(name, ids, vocab_size)
            return engine.tokenizer.decode(checked, skip_special_tokens=body.skip_special_tokens)

        if not any(isinstance(one, list) for one in body.tokens):
            return json_response({"text": text("tokens", body.tokens)})
        if not all(isinstance(one, list) for one in body.tokens):
            raise RequestError("tokens must be ids or lists of ids, not both.", "tokens")
        texts = [text(f"tokens[{i}]", one) for i, one in enumerate(body.tokens)]  # pyright: ignore[reportArgumentType]
        return json_response({"text": texts})
