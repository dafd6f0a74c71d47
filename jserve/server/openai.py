"""What chat and text completions share: sampling defaults, requests, the stream.

Refuses to know transport (exchange.py) and what a choice looks like (chat.py, completions.py).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jserve.errors import NotFoundError, RequestError
from jserve.server.answer import Shape, answer
from jserve.server.bodies import OpenAIBody
from jserve.server.exchange import Serving, made_of_body, stream_response
from jserve.server.ids import given_rids
from jserve.server.replies import sse
from jserve.server.syntax import answer_syntax
from jserve.server.usage import StreamOptions, usage
from jserve.types import GenerateRequest, LogprobParams, Output, SamplingParams

#: A body, its requests, and how their choices are written.
Asked = tuple[OpenAIBody, list[GenerateRequest], Shape]


def check_model(serving: Serving, model: str) -> None:
    """Raise NotFoundError unless `model` is served; "default" always is."""
    name = serving.model_name
    if model not in ("default", name, serving.config.model.model_path):
        raise NotFoundError(f"model {model!r} is not served here; use {name!r}.", "model")


def sampling(body: OpenAIBody, limit: int | None, defaults: Mapping[str, float]) -> SamplingParams:
    """What the body leaves open is `defaults`' or the API's own. The engine checks ranges."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true.", "stream_options")

    def pick(name: str, given: float | None, last: float) -> float:
        return defaults.get(name, last) if given is None else given

    syntax = (body.json_schema, body.regex, body.ebnf, body.structural_tag, body.choices)
    constrained = body.response_format is not None or body.json_object or syntax != (None,) * 5
    return SamplingParams(
        max_new_tokens=limit,
        min_new_tokens=body.min_tokens,
        temperature=float(pick("temperature", body.temperature, 1.0)),
        top_p=float(pick("top_p", body.top_p, 1.0)),
        top_k=int(pick("top_k", body.top_k, -1)),
        min_p=float(pick("min_p", body.min_p, 0.0)),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=float(pick("repetition_penalty", body.repetition_penalty, 1.0)),
        logit_bias=body.logit_bias,
        stop=tuple([stop] if isinstance(stop := body.stop, str) else stop),
        stop_regex=tuple([stop] if isinstance(stop := body.stop_regex, str) else stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        n=body.n,
        sampling_seed=body.seed,
        skip_special_tokens=body.skip_special_tokens,
        no_stop_trim=body.no_stop_trim,
        **(answer_syntax(body) if constrained else {}),
    )


def requests(
    body: OpenAIBody,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    logprobs: LogprobParams | None,
    origin: Mapping[str, Any],
) -> list[GenerateRequest]:
    """One GenerateRequest a prompt, each under an id of its own. `origin`: exchange.origin's.
    Raises RequestError naming rid."""
    new = [uuid.uuid4().hex for _ in prompts]
    rids = new if body.rid is None else given_rids(body.rid, len(prompts))
    return [
        GenerateRequest(
            sampling=params,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            rid=rid,
            logprobs=logprobs,
            extra_key=body.extra_key or None,
            cache_salt=body.cache_salt or None,
            priority=body.priority,
            stream=body.stream,
            **origin,
        )
        for prompt, rid in zip(prompts, rids, strict=True)
    ]


async def respond(request: Request, serving: Serving, read: Callable[[bytes], Asked]) -> Response:
    """Answer with the choices of what `read` makes of the body, as they come or all at once."""
    body, asked, shape = await made_of_body(request, read, serving.pool)
    head = {
        "id": asked[0].rid,
        "object": shape.chunk if body.stream else shape.full,
        "created": int(time.time()),
        "model": serving.model_name,
    }
    if not body.stream:
        return await answer(request, serving, asked, shape, head)
    options = body.stream_options or StreamOptions()

    async def events() -> AsyncGenerator[bytes, None]:
        # Only the choice is encoded for each chunk; what stands around it is made once.
        start = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        tail = b'],"usage":null}\n\n'
        latest: dict[int, Output] = {}
        async with contextlib.aclosing(serving.outputs(asked)) as outputs:
            async for output in outputs:
                latest[output.index] = output
                if options.continuous_usage_stats:
                    counts = msgspec.json.encode(usage(serving, [output], 1))
                    tail = b'],"usage":' + counts + b"}\n\n"
                for choice in shape.chunks(output):
                    yield start + msgspec.json.encode(choice) + tail
        if options.include_usage:
            counts = usage(serving, list(latest.values()), body.n)
            yield sse({**head, "choices": [], "usage": counts})

    return await stream_response(request, serving, events())
