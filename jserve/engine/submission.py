"""GenerateRequest → Submit: text becomes ids, and all is refused that can be on this side."""

from __future__ import annotations

import asyncio
import time

from jserve.engine.misfit import misfit, too_long
from jserve.errors import RequestError
from jserve.tokenizer.stop_regex import check_stop_regexes
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import GenerateRequest, Submit

_LONG_TEXT = 32 * 1024  # characters that would stop the event loop for milliseconds


async def make_submit(
    request: GenerateRequest, rid: str, tokenizer: Tokenizer, limits: tuple[int, int]
) -> Submit:
    """The request as the engine gets it, but for n and grammar, once its sampling parameters are
    within range. `limits`: vocabulary size, context length. Raises RequestError naming the field.
    """
    created, text, (vocab_size, context) = request.created or time.time(), request.text, limits
    if (text is None) == (request.input_ids is None):
        raise RequestError("Exactly one of text and input_ids must be given.", "text")
    if text is None:
        ids = list(request.input_ids or ())
    elif len(text) > 2 * tokenizer.longest_token * context:
        raise too_long(text, context)
    elif len(text) > _LONG_TEXT:
        ids = await asyncio.to_thread(tokenizer.encode, text, request.add_special)
    else:
        ids = tokenizer.encode(text, request.add_special)
    field, wanted = "input_ids" if text is None else "text", request.sampling.max_new_tokens or 0
    if not 0 < len(ids) < context or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise misfit(field, ids, wanted, vocab_size, context)
    if len(ids) + wanted > context:
        raise misfit(field, ids, wanted, vocab_size, context)
    if request.sampling.stop_regex:
        await asyncio.to_thread(check_stop_regexes, request.sampling.stop_regex)
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs.verify(len(ids), vocab_size)
        logprobs = logprobs.meant(request.sampling.max_new_tokens)
    return Submit(
        rid=rid,
        prompt_ids=ids,
        sampling=request.sampling,
        logprobs=logprobs,
        extra_key=request.extra_key,
        cache_salt=request.cache_salt,
        priority=request.priority,
        stream=request.stream,
        created=created,
        sent=time.time(),
        routed_dp_rank=request.routed_dp_rank,
    )
