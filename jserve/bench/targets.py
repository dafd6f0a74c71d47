"""Whom a benchmark asks: one prompt in, one Sample out, over HTTP or of an engine in this process.

A request that fails is a Sample with an error, never an exception.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import httpx
import msgspec

from jserve.bench.samples import Sample
from jserve.errors import JserveError
from jserve.types import GenerateRequest, LogprobParams, Output, SamplingParams


class Target(Protocol):
    """`knows_ids`: samples tell what was generated, so that a conversation can go on."""

    @property
    def knows_ids(self) -> bool: ...

    async def ask(self, prompt_ids: list[int], max_new_tokens: int) -> Sample: ...


class Generator(Protocol):
    """What EngineTarget needs of `jserve.Engine`."""

    def generate_stream(self, request: GenerateRequest, /) -> AsyncIterator[Output]: ...


class EngineTarget:
    """An engine in this process, greedy.

    Args:
        stream: False: only the whole answer comes, and the Sample has no ttft of its own.
        regex: what every answer follows.
        margins: note how far each token's log-probability was ahead of the runner-up's.
    """

    knows_ids = True

    def __init__(
        self,
        engine: Generator,
        *,
        ignore_eos: bool = True,
        stream: bool = True,
        margins: bool = False,
        regex: str | None = None,
    ) -> None:
        self._engine, self._regex = engine, regex
        self._ignore_eos, self._stream = ignore_eos, stream
        self._logprobs = LogprobParams(top_num=2) if margins else None

    async def ask(self, prompt_ids: list[int], max_new_tokens: int) -> Sample:
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            ignore_eos=self._ignore_eos,
            regex=self._regex,
        )
        request = GenerateRequest(
            sampling=sampling, input_ids=prompt_ids, stream=self._stream, logprobs=self._logprobs
        )
        sample = Sample(len(prompt_ids), start=time.perf_counter())
        try:
            async for output in self._engine.generate_stream(request):
                sample.arrived(output.completion_tokens)
                sample.cached_tokens = output.cached_tokens
                sample.output_ids += output.new_ids
                if output.finish is not None and output.output_logprobs is not None:
                    tops = output.output_logprobs.top
                    sample.margins = [top[0][0] - top[1][0] for top in tops if top is not None]
        except JserveError as error:
            sample.error = str(error)
        return sample


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int = 0


class _NativeChunk(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    output_ids: list[int] = []
    error: Any = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _OpenAIChunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class HttpTarget:
    """A server. `protocol`: native (SGLang's /generate) or openai (/v1/completions).

    `clients` of it take turns: a client looks at all its connections for every request, which with
    256 of them costs more than the request.
    """

    def __init__(
        self,
        clients: Sequence[httpx.AsyncClient],
        protocol: str,
        *,
        model: str = "default",
        ignore_eos: bool = True,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        self._clients = itertools.cycle(clients)
        self.knows_ids = protocol == "native"
        self._model, self._ignore_eos, self._extra = model, ignore_eos, extra_body or {}
        bodies = {"native": self._native_body, "openai": self._openai_body}
        readers = {"native": _read_native, "openai": _read_openai}
        self._url = {"native": "/generate", "openai": "/v1/completions"}[protocol]
        self._body, self._read = bodies[protocol], readers[protocol]

    async def ask(self, prompt_ids: list[int], max_new_tokens: int) -> Sample:
        sample = Sample(len(prompt_ids), start=time.perf_counter())
        content = msgspec.json.encode({**self._body(prompt_ids, max_new_tokens), **self._extra})
        headers = {"Content-Type": "application/json"}
        try:
            client = next(self._clients)
            async with client.stream("POST", self._url, content=content, headers=headers) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    sample.error = f"HTTP {reply.status_code}: {text[:300]}"
                    return sample
                async for data in _events(reply.aiter_raw()):
                    self._read(data, sample)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        if not sample.output_len and not sample.error:
            sample.error = "the answer held no token"
        return sample

    def _native_body(self, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        return {
            "input_ids": prompt_ids,
            "sampling_params": {**sampling, "ignore_eos": self._ignore_eos},
            "stream": True,
        }

    def _openai_body(self, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": self._ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _decoder(kind: type[Any]) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


_decode_native, _decode_openai = _decoder(_NativeChunk), _decoder(_OpenAIChunk)


def _read_native(data: bytes, sample: Sample) -> None:
    """The server tells its count of tokens with each chunk."""
    chunk: _NativeChunk = _decode_native(data)
    if chunk.error is not None:
        sample.error = str(chunk.error)
        return
    sample.arrived(chunk.meta_info.completion_tokens)
    sample.cached_tokens = chunk.meta_info.cached_tokens
    sample.output_ids = chunk.output_ids


def _read_openai(data: bytes, sample: Sample) -> None:
    """A chunk with text is a token, until the usage at the end tells their number."""
    chunk: _OpenAIChunk = _decode_openai(data)
    if chunk.error is not None:
        sample.error = str(chunk.error)
        return
    if any(choice.text for choice in chunk.choices):
        sample.arrived(sample.output_len + 1)
    if chunk.usage is not None and chunk.usage.completion_tokens:
        sample.output_len = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        sample.cached_tokens = 0 if details is None else details.cached_tokens


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events, without the closing [DONE]."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield data
