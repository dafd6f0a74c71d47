"""How a prompt and its answer look over HTTP: SGLang's /generate, OpenAI's completions and chats.

Owns bodies and what an answer adds to a Sample. Refuses to know connections and clocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jserve.bench.samples import Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How every prompt is asked. `decode` is what a chat's text comes from."""

    model: str = "default"
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    stream: bool = True
    return_logprob: bool = False
    decode: Callable[[Sequence[int]], str] | None = None
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """One API: `body` of a prompt; `read` adds a chunk to a Sample, `read_whole` an answer.

    `knows_ids`: it tells what was generated, token by token.
    """

    url: str
    knows_ids: bool
    body: Callable[[Asking, list[int], int], dict[str, Any]]
    read: Callable[[bytes, Sample], object]
    read_whole: Callable[[bytes, Sample], object]


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int | None = None


class _NativeChunk(msgspec.Struct):
    text: str = ""
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    output_ids: list[int] = []
    error: Any = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """`text` of a completion, `delta` of a chat's chunk, `message` of a whole chat."""

    text: str = ""
    delta: _Message | None = None
    message: _Message | None = None

    @property
    def all_text(self) -> str:
        said = self.delta or self.message
        return self.text if said is None else f"{said.reasoning_content or ''}{said.content or ''}"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _OpenAIChunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_native = msgspec.json.Decoder(_NativeChunk).decode
_decode_openai = msgspec.json.Decoder(_OpenAIChunk).decode


def _native_body(asking: Asking, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    sampling = {
        "temperature": asking.temperature,
        "top_p": asking.top_p,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": asking.ignore_eos,
    }
    logprobs = {"return_logprob": True, "logprob_start_len": -1} if asking.return_logprob else {}
    body = {"input_ids": prompt_ids, "sampling_params": sampling, "stream": asking.stream}
    return {**body, **logprobs}


def _openai_body(asking: Asking) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if asking.stream else {}
    return {
        "model": asking.model,
        "temperature": asking.temperature,
        "top_p": asking.top_p,
        "ignore_eos": asking.ignore_eos,
        "stream": asking.stream,
        **usage,
    }


def _completion_body(asking: Asking, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    return {**_openai_body(asking), "prompt": prompt_ids, "max_tokens": max_new_tokens}


def _chat_body(asking: Asking, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    assert asking.decode is not None, "a chat is text"
    messages = [{"role": "user", "content": asking.decode(prompt_ids)}]
    return {
        **_openai_body(asking),
        "messages": messages,
        "max_completion_tokens": max_new_tokens,
    }


def _read_native(data: bytes, sample: Sample) -> None:
    """The server tells its count of tokens with each chunk."""
    chunk: _NativeChunk = _decode_native(data)
    if chunk.error is not None:
        sample.error = str(chunk.error)
        return
    sample.arrived(chunk.meta_info.completion_tokens)
    sample.cached_tokens = chunk.meta_info.cached_tokens
    sample.output_ids, sample.text = chunk.output_ids, chunk.text


def _read_openai(data: bytes, sample: Sample) -> _Usage | None:
    """A chunk with text is a token, until the usage at the end tells their number. Tokens without
    text arrive with the usage.
    """
    chunk: _OpenAIChunk = _decode_openai(data)
    if chunk.error is not None:
        sample.error = str(chunk.error)
        return None
    text = "".join(choice.all_text for choice in chunk.choices)
    if text:
        sample.arrived(sample.output_len + 1)
        sample.text += text
    if chunk.usage is not None and chunk.usage.completion_tokens:
        if not sample.output_len:
            sample.arrived(chunk.usage.completion_tokens)
        sample.output_len = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        sample.cached_tokens = None if details is None else details.cached_tokens
    return chunk.usage


def _read_chat(data: bytes, sample: Sample) -> _Usage | None:
    """What the template adds to a prompt is known to the server only."""
    usage = _read_openai(data, sample)
    if usage is not None and usage.prompt_tokens:
        sample.prompt_len = usage.prompt_tokens
    return usage


def _whole(read: Callable[[bytes, Sample], _Usage | None]) -> Callable[[bytes, Sample], None]:
    def read_whole(data: bytes, sample: Sample) -> None:
        if read(data, sample) is None and not sample.error:
            sample.error = "the answer has no usage to count by: leave --disable-stream out"

    return read_whole


WIRES = {
    "native": Wire("/generate", True, _native_body, _read_native, _read_native),
    "openai": Wire("/v1/completions", False, _completion_body, _read_openai, _whole(_read_openai)),
    "chat": Wire("/v1/chat/completions", False, _chat_body, _read_chat, _whole(_read_chat)),
}
