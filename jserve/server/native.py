"""SGLang's native routes: /generate, facts, cache and abort control.

Refuses to know transport (exchange.py) and field checks (protocol.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jserve import __version__
from jserve.engine.engine import render_output
from jserve.engine.flush import flush_when_idle
from jserve.engine.requests import expand
from jserve.errors import RequestError
from jserve.metrics import CONTENT_TYPE
from jserve.server import unsupported
from jserve.server.exchange import (
    Serving,
    made_of_body,
    origin,
    read_body,
    stream_response,
    while_connected,
)
from jserve.server.outputs import finished
from jserve.server.protocol import Body, Int, decode
from jserve.server.replies import json_response, sse
from jserve.server.sequences import check_count, num_sequences
from jserve.types import GenerateRequest, Output

_MAX_NOTHING = 16  # bytes of a body that says nothing


class GenerateBody(Body):
    """/generate. A list of texts or of id lists is a batch; lists then hold one value a prompt."""

    unsupported: ClassVar[Mapping[str, Any]] = unsupported.GENERATE

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: Int | list[Int | None] | None = None
    top_logprobs_num: Int | list[Int] = 0
    token_ids_logprob: list[Int | list[Int] | None] = field(default_factory=list)
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    priority: Int | list[Int | None] | None = None
    external_trace_header: dict[str, str] = field(default_factory=dict)  # its traceparent
    log_metrics: bool = True
    no_logs: bool = False
    require_reasoning: bool = False
    # Accepted: hints to routers.
    background: bool = False
    routing_key: str = ""
    conversation_id: str = ""


class AbortBody(Body):
    rid: str = ""
    abort_all: bool = False


class NativeRoutes:
    """Handlers outside /v1, and the few that answer there too."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request) -> Response:
        id_to_text = self._serving.engine.tokenizer.id_to_text
        asked = functools.partial(_asked, origin(request))
        body, requests, listed = await made_of_body(request, asked, self._serving.pool)
        sequences = [one for one in requests for _ in range(one.sampling.n)]

        def render(output: Output) -> dict[str, Any]:
            answer = render_output(output, sequences[output.index], id_to_text)
            if body.return_prompt_token_ids:
                answer["prompt_token_ids"] = output.prompt_ids
            return answer | {"index": output.index} if listed and body.stream else answer

        async def events() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(self._serving.outputs(requests)) as outputs:
                async for output in outputs:
                    yield sse(render(output))

        if body.stream:
            return await stream_response(request, self._serving, events())
        outputs = await while_connected(request.receive, finished(self._serving.outputs(requests)))
        answers = [render(output) for output in outputs]
        return json_response(answers if listed else answers[0])

    async def root(self, request: Request) -> Response:
        return PlainTextResponse("jserve is running.")

    async def model_info(self, request: Request) -> Response:
        options, model = self._serving.config.model, self._serving.engine.model_config
        info = {
            "model_path": options.model_path,
            "served_model_name": self._serving.model_name,
            "tokenizer_path": options.tokenizer_path or options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": options.load_format,
            "reasoning_parser": self._serving.config.server.reasoning_parser,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.model_type,
            "architectures": [model.architecture],
        }
        return json_response(info)

    async def server_info(self, request: Request) -> Response:
        """Every option but the key, what the engine resolved them to, and its state."""
        engine = self._serving.engine
        reply = await engine.control("server_info")
        flags = self._serving.config.flat()
        del flags["api_key"]
        own = reply.payload.get("internal_states")  # of each data-parallel rank
        states = own or [{**engine.gauges, **reply.payload}]
        facts = engine.server_info  # those that change, and of ranks that are left, as of now
        facts = facts | {name: reply.payload[name] for name in facts if name in reply.payload}
        deaf = {"deaf_dp_ranks": reply.deaf} if own else {}
        known = {**flags, **facts, "version": __version__, "internal_states": states, **deaf}
        return json_response(known)

    async def flush_cache(self, request: Request) -> Response:
        """200 when flushed, 400 when the engine is busy for longer than `timeout` seconds."""
        await _read_nothing(request)
        text = request.query_params.get("timeout", "0")
        try:
            timeout = float(text)
        except ValueError:
            raise RequestError(f"timeout must be seconds, got {text!r}.", "timeout") from None
        work = flush_when_idle(self._serving.engine.control, timeout)
        reply = await while_connected(request.receive, work)
        if reply.ok:
            return PlainTextResponse("Cache flushed.\n")
        why = reply.message or "requests are running or waiting."
        return PlainTextResponse(f"Cache not flushed: {why}\n", 400)

    async def abort(self, request: Request) -> Response:
        engine = self._serving.engine
        body = decode(await read_body(request), AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("rid is required unless abort_all is true.", "rid")
        engine.abort(body.rid, body.abort_all)
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._serving.engine.metrics.render(), media_type=CONTENT_TYPE)


def _asked(
    begun: Mapping[str, Any], raw: bytes
) -> tuple[GenerateBody, list[GenerateRequest], bool]:
    """The body, one GenerateRequest a prompt, and whether the answer is a list. Raises
    RequestError. `begun`: exchange.origin's."""
    body = decode(raw, GenerateBody)
    trace = body.external_trace_header.get("traceparent", begun["traceparent"])
    requests, listed = _requests(body)
    begun = {**begun, "traceparent": trace}
    return body, [msgspec.structs.replace(one, **begun) for one in requests], listed


def _requests(body: GenerateBody) -> tuple[list[GenerateRequest], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("exactly one of text and input_ids is required.", "text")
    if [] in (body.text, body.input_ids):
        raise RequestError("text or input_ids must not be empty.", "text")
    name, prompts = ("input_ids", body.input_ids) if body.text is None else ("text", body.text)
    batch = isinstance(prompts, list) and any(isinstance(one, str | list) for one in prompts)
    num_prompts = len(prompts) if batch and prompts else 1
    check_count(num_prompts, num_sequences(num_prompts, body.sampling_params), name)
    return expand(
        prompt=body.text,
        # The types below are told apart, and checked, in expand.
        sampling_params=body.sampling_params,  # pyright: ignore[reportArgumentType]
        input_ids=body.input_ids,  # pyright: ignore[reportArgumentType]
        return_logprob=body.return_logprob,
        logprob_start_len=body.logprob_start_len,
        top_logprobs_num=body.top_logprobs_num,
        token_ids_logprob=body.token_ids_logprob,  # pyright: ignore[reportArgumentType]
        return_text_in_logprobs=body.return_text_in_logprobs,
        stream=body.stream,
        rid=body.rid,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
        log_metrics=body.log_metrics,
        no_logs=body.no_logs,
        require_reasoning=body.require_reasoning,
    )


async def _read_nothing(request: Request) -> None:
    """Raises RequestError for a body that says something; a long one is not read."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_NOTHING:
            break
    if len(body) > _MAX_NOTHING or body.strip() not in (b"", b"{}"):
        rule = f"{request.url.path} takes no body; timeout goes into the query string."
        raise RequestError(rule)
