"""OpenAI's `usage`: what a stream may ask of it, and the counts of an answer from its Outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jserve.server.exchange import Serving
from jserve.server.protocol import Body
from jserve.types import Output


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False  # accepted: padding is the server's to add


def usage(serving: Serving, outputs: Sequence[Output], n: int) -> dict[str, Any]:
    """Token counts; the `n` sequences of a prompt count it once."""
    prompts = [output for output in outputs if output.index % n == 0]
    prompt_tokens = sum(output.prompt_tokens for output in prompts)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    report = serving.config.server.enable_cache_report
    cached = {"cached_tokens": sum(output.cached_tokens for output in prompts)}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "reasoning_tokens": sum(output.reasoning_tokens for output in outputs),
        "prompt_tokens_details": cached if report else None,
    }
