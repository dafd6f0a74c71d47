"""SGLang's native routes: /generate, health, facts, cache and abort control, tokenization.

Refuses to know transport (exchange.py) and field checks (protocol.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jserve import __version__
from jserve.engine.engine import render_output
from jserve.engine.flush import flush_when_idle
from jserve.engine.requests import expand
from jserve.errors import JserveError, QueueFullError, RequestError, TimedOutError
from jserve.metrics import CONTENT_TYPE
from jserve.server import openai, unsupported
from jserve.server.chat import prompt_ids
from jserve.server.exchange import Serving, origin, read_body, stream_response, while_connected
from jserve.server.ids import check_ids
from jserve.server.models import context_length
from jserve.server.outputs import finished
from jserve.server.protocol import Body, Int, decode
from jserve.server.replies import json_response, sse
from jserve.types import GenerateRequest, Output, SamplingParams

_HEALTH_TIMEOUT = 20.0  # seconds
_MAX_SEQUENCES = 4096  # of one /generate body, prompts times n


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


class TokenizeBody(Body):
    model: str = "default"
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True  # messages end with the beginning of an answer
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class DetokenizeBody(Body):
    tokens: list[Int | list[Int]]
    model: str = "default"
    skip_special_tokens: bool = True


class NativeRoutes:
    """Handlers outside /v1, and the few that answer there too."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request) -> Response:
        id_to_text, begun = self._serving.engine.tokenizer.id_to_text, origin(request)
        body = decode(await read_body(request), GenerateBody)
        begun["traceparent"] = body.external_trace_header.get("traceparent", begun["traceparent"])
        requests, listed = _requests(body)
        requests = [msgspec.structs.replace(one, **begun) for one in requests]
        wanted = sum(one.sampling.n for one in requests)
        if wanted > _MAX_SEQUENCES:
            field = "n" if len(requests) == 1 else "text"
            rule = f"at most {_MAX_SEQUENCES} sequences may be asked for at once, got {wanted}."
            raise RequestError(f"{field}: {rule}", field)
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

    async def health(self, request: Request) -> Response:
        """200 once the engine serves and as long as it lives."""
        return Response(status_code=200 if self._healthy() else 503)

    async def health_generate(self, request: Request) -> Response:
        """200 when a request of one token comes back in time. In a pause it would wait for the end
        of that; then an answer of the engine is enough.
        """
        if not self._healthy():
            return Response(status_code=503)
        probe = GenerateRequest(
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            input_ids=[0],
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            log_metrics=False,
            no_logs=True,
        )

        async def answered() -> None:
            state = await self._serving.engine.control("server_info")
            if not state.payload.get("paused"):
                await finished(self._serving.outputs([probe]))

        work = asyncio.wait_for(answered(), _HEALTH_TIMEOUT)
        try:
            await while_connected(request.receive, work)
        except (QueueFullError, TimedOutError):
            return Response(status_code=200)  # busy, so alive
        except (JserveError, TimeoutError):
            return Response(status_code=503)
        return Response(status_code=200)

    def _healthy(self) -> bool:
        return self._serving.loaded is not None and self._serving.loaded.healthy

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
        info = {**flags, **engine.server_info, "version": __version__, "internal_states": states}
        return json_response(info)

    async def flush_cache(self, request: Request) -> Response:
        """200 when flushed, 400 when the engine is busy for longer than `timeout` seconds."""
        if (await request.body()).strip() not in (b"", b"{}"):
            raise RequestError("/flush_cache takes no body; timeout goes into the query string.")
        text = request.query_params.get("timeout", "0")
        try:
            timeout = float(text)
        except ValueError:
            raise RequestError(f"timeout must be seconds, got {text!r}.", "timeout") from None
        reply = await flush_when_idle(self._serving.engine.control, timeout)
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

    async def tokenize(self, request: Request) -> Response:
        tokenizer = self._serving.engine.tokenizer
        raw = await read_body(request)
        body = decode(raw, TokenizeBody)
        openai.check_model(self._serving, body.model)
        if (body.prompt is None) == (not body.messages):
            raise RequestError("exactly one of prompt and messages is required.", "prompt")
        if body.prompt is None:
            options = (body.continue_final_message, body.chat_template_kwargs, len(raw))
            begin = body.add_generation_prompt
            tokens = await prompt_ids(tokenizer, body.messages, *options, begin)
        elif isinstance(body.prompt, str):
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        else:
            texts = body.prompt
            lists = await asyncio.to_thread(
                lambda: [tokenizer.encode(text, body.add_special_tokens) for text in texts]
            )
            count = [len(ids) for ids in lists]
            return self._tokenized(lists, count)
        return self._tokenized(tokens, len(tokens))

    def _tokenized(self, tokens: list[Any], count: int | list[int]) -> Response:
        limit = context_length(self._serving)
        return json_response({"tokens": tokens, "count": count, "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        engine = self._serving.engine
        body = decode(await read_body(request), DetokenizeBody)
        openai.check_model(self._serving, body.model)
        vocab_size = engine.model_config.vocab_size

        def text(name: str, ids: Sequence[Any]) -> str:
            checked = check_ids(name, ids, vocab_size)
            return engine.tokenizer.decode(checked, skip_special_tokens=body.skip_special_tokens)

        if not any(isinstance(one, list) for one in body.tokens):
            return json_response({"text": text("tokens", body.tokens)})
        if not all(isinstance(one, list) for one in body.tokens):
            raise RequestError("tokens must be ids or lists of ids, not both.", "tokens")
        texts = [text(f"tokens[{i}]", one) for i, one in enumerate(body.tokens)]  # pyright: ignore[reportArgumentType]
        return json_response({"text": texts})

    async def metrics(self, request: Request) -> Response:
        return Response(self._serving.engine.metrics.render(), media_type=CONTENT_TYPE)


def _requests(body: GenerateBody) -> tuple[list[GenerateRequest], bool]:
    """One GenerateRequest a prompt, and whether the answer is a list. Raises RequestError."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("exactly one of text and input_ids is required.", "text")
    if [] in (body.text, body.input_ids):
        raise RequestError("text or input_ids must not be empty.", "text")
    given = {
        "logprob_start_len": body.logprob_start_len not in (None, -1),
        "top_logprobs_num": any(_listed(body.top_logprobs_num)),
        "token_ids_logprob": bool(body.token_ids_logprob),
    }
    for name, used in given.items():
        if used and not any(_listed(body.return_logprob)):
            raise RequestError(f"{name} needs return_logprob: true.", name)
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


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
