"""GenerateRequest → Submit: text becomes ids, and all is refused that can be on this side."""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec

from jserve.engine.ranges import check_ranges
from jserve.errors import RequestError
from jserve.tokenizer.stop_regex import check_stop_regexes
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import GenerateRequest, Submit

_LONG_TEXT = 32 * 1024  # characters that would stop the event loop for milliseconds


async def make_submit(
    request: GenerateRequest, tokenizer: Tokenizer, vocab_size: int, context_length: int
) -> Submit:
    """The request as the engine gets it, but for n. Raises RequestError naming the field."""
    created, text = request.created or time.time(), request.text
    if (text is None) == (request.input_ids is None):
        raise RequestError("Exactly one of text and input_ids must be given.", "text")
    if text is None:
        prompt_ids = list(request.input_ids or ())
    else:
        if len(text) > 2 * tokenizer.longest_token * context_length:  # not worth tokenizing
            message = f"text has {len(text)} characters, too many for a context of {context_length}"
            raise RequestError(f"{message} tokens.", "text")
        if len(text) > _LONG_TEXT:
            prompt_ids = await asyncio.to_thread(tokenizer.encode, text, request.add_special)
        else:
            prompt_ids = tokenizer.encode(text, request.add_special)
    _check(request, prompt_ids, vocab_size, context_length)
    if request.sampling.stop_regex:
        await asyncio.to_thread(check_stop_regexes, request.sampling.stop_regex)
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs.verify(len(prompt_ids), vocab_size)
        if request.sampling.max_new_tokens == 0 and logprobs.start_len < 0:
            # without output, the prompt's are meant
            logprobs = msgspec.structs.replace(logprobs, start_len=0)
    return Submit(
        rid=request.rid or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=request.sampling,
        logprobs=logprobs,
        extra_key=request.extra_key,
        cache_salt=request.cache_salt,
        priority=request.priority,
        stream=request.stream,
        created=created,
        sent=time.time(),
    )


def _check(request: GenerateRequest, prompt_ids: list[int], vocab_size: int, context: int) -> None:
    field = "text" if request.input_ids is None else "input_ids"
    length, wanted = len(prompt_ids), request.sampling.max_new_tokens or 0
    if length == 0:
        raise RequestError(f"{field} must hold at least one token.", field)
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise RequestError(f"{field} must hold ids in [0, {vocab_size}).", field)
    if length >= context:
        message = f"{field}: the prompt has {length} tokens, but the context length is {context}."
        raise RequestError(message, field)
    check_ranges(request.sampling, vocab_size)
    if length + wanted > context:
        why = f"{length} prompt tokens + {wanted} new tokens > context length {context}."
        raise RequestError(f"max_new_tokens (or its default) is too large: {why}", "max_new_tokens")
