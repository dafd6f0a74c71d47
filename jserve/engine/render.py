"""An Output as SGLang's response body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jserve.types import FinishReason, GenerateRequest, LogprobParams, Output, TokenLogprobs

_FINISH_FIELDS = {
    "stop": ("matched",),
    "length": ("length",),
    "abort": ("message", "status_code", "err_type"),
}
_NONE = TokenLogprobs(token_ids=[], values=[])


def render_output(
    output: Output, request: GenerateRequest, id_to_text: Callable[[int], str]
) -> dict[str, Any]:
    """{"text", "output_ids", "meta_info"}, all cumulative.

    `id_to_text` is used only where the request wants text in its log-probabilities.
    """
    meta = _meta_info(output)
    if request.logprobs is not None:
        text = id_to_text if request.return_text_in_logprobs else _no_text
        meta |= _logprobs("input", output.input_logprobs or _NONE, request.logprobs, text)
        meta |= _logprobs("output", output.output_logprobs or _NONE, request.logprobs, text)
        meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
    return {"text": output.text, "output_ids": output.output_ids, "meta_info": meta}


def _meta_info(output: Output) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": _finish(output.finish),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "weight_version": "default",
        "num_retractions": output.num_retractions,
        "reasoning_tokens": output.reasoning_tokens,
    }
    if output.finish is None:
        return meta
    if output.times.dp_rank is not None:
        meta["dp_rank"] = output.times.dp_rank
    times = output.times
    created, first, now = times.created, times.first_token, times.latest
    meta |= {"e2e_latency": now - created, "response_sent_to_client_ts": now}
    if times.shown and first:
        meta |= {
            "queue_time": times.queued,
            "prefill_finished_time": times.prefill_finished,
            "request_received_ts": created,
            "first_token_latency": first - created,
            "request_finished_ts": now,
        }
        decoded = output.completion_tokens - 1  # the first token came with the prompt
        if decoded > 0 and now > first:
            meta["decode_throughput"] = decoded / (now - first)
    return meta


def _finish(finish: FinishReason | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    fields = {name: getattr(finish, name) for name in _FINISH_FIELDS[finish.type]}
    return {"type": finish.type, **fields}


def _logprobs(
    side: str, logprobs: TokenLogprobs, wanted: LogprobParams, text: Callable[[int], str | None]
) -> dict[str, list[Any]]:
    """Triples [log-probability, id, text]."""
    chosen = zip(logprobs.values, logprobs.token_ids, strict=True)
    meta: dict[str, list[Any]] = {
        f"{side}_token_logprobs": [[value, token, text(token)] for value, token in chosen]
    }
    if wanted.top_num:
        meta[f"{side}_top_logprobs"] = [
            None if row is None else [[value, token, text(token)] for value, token in row]
            for row in logprobs.top
        ]
    if wanted.token_ids:
        names = [(token, text(token)) for token in wanted.token_ids]
        meta[f"{side}_token_ids_logprobs"] = [
            None
            if row is None
            else [[value, *name] for value, name in zip(row, names, strict=True)]
            for row in logprobs.ids
        ]
    return meta


def _no_text(token: int) -> None:
    return None
