"""The fields of requests under /v1, their types and what they default to: records without logic.

What a field means is openai.py's, chat.py's, completions.py's and tokens.py's to say, its range the
engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import field

from jserve.server import unsupported
from jserve.server.protocol import Body, Int
from jserve.server.usage import StreamOptions
from jserve.types import Name

Bias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]  # anything larger overflows in float32


class OpenAIBody(Body):
    """What chat and text completions share."""

    model: str = "default"
    n: Int = 1
    max_tokens: Int | None = None
    min_tokens: Int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[Int, Bias] = field(default_factory=dict)
    seed: Int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_regex: str | list[str] = field(default_factory=list)
    stop_token_ids: list[Int] = field(default_factory=list)
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    rid: Name | list[Name] | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None
    priority: Int | None = None
    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    choices: list[str] | None = None
    json_object: bool = False
    user: str = ""  # accepted
    metadata: dict[str, str] = field(default_factory=dict)  # accepted


class ChatBody(OpenAIBody):
    unsupported: ClassVar[Mapping[str, Any]] = unsupported.CHAT

    messages: list[dict[str, Any]] = field(default_factory=list)
    input_ids: list[Int] | None = None  # used in place of the rendered messages
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_prompt_token_ids: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    # Accepted: without tools there is nothing to split; keys and ids are hints.
    parallel_tool_calls: bool = True
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    safety_identifier: str = ""
    service_tier: Literal["auto", "default"] = "auto"


class Message(Body):
    unsupported: ClassVar[Mapping[str, Any]] = unsupported.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


class CompletionBody(OpenAIBody):
    unsupported: ClassVar[Mapping[str, Any]] = unsupported.COMPLETION

    prompt: str | list[str | Int | list[Int]] = field(default_factory=list)
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool = False
    best_of: Int | None = None


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
