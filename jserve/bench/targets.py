"""Whom a benchmark asks: one prompt in, one Sample out, over HTTP or of an engine in this process.

A request that fails is a Sample with an error, never an exception.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import httpx
import msgspec

from jserve.bench.samples import Sample
from jserve.bench.wire import WIRES, Asking
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


class HttpTarget:
    """A server. `wire`: native (SGLang's /generate), openai (/v1/completions) or chat.

    `clients` of it take turns: a client looks at all its connections for every request, which with
    256 of them costs more than the request.
    """

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], wire: str, asking: Asking | None = None
    ) -> None:
        self._clients = itertools.cycle(clients)
        self._wire, self._asking = WIRES[wire], asking or Asking()
        self.knows_ids = self._wire.knows_ids
        self._listen = self._chunks if self._asking.stream else self._whole

    async def ask(self, prompt_ids: list[int], max_new_tokens: int) -> Sample:
        wire, asking = self._wire, self._asking
        body = {**wire.body(asking, prompt_ids, max_new_tokens), **asking.extra_body}
        sample = Sample(len(prompt_ids), start=time.perf_counter())
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            client = next(self._clients)
            async with client.stream("POST", wire.url, content=content, headers=headers) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    sample.error = f"HTTP {reply.status_code}: {text[:300]}"
                    return sample
                await self._listen(reply, sample)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        if not sample.output_len and not sample.error:
            sample.error = "the answer held no token"
        return sample

    async def _chunks(self, reply: httpx.Response, sample: Sample) -> None:
        async for data in _events(reply.aiter_raw()):
            self._wire.read(data, sample)

    async def _whole(self, reply: httpx.Response, sample: Sample) -> None:
        self._wire.read_whole(await reply.aread(), sample)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events, without the closing [DONE]."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield data
