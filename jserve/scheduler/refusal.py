"""Why a request could never run, in words for its sender. Decides nothing: see make_request."""

from __future__ import annotations

from jserve.errors import RequestError


def misfit(length: int, limit: int, start: int, context: int, capacity: int) -> RequestError:
    """A prompt of `length` tokens, or what is wanted with it, is out of the bounds."""
    has = f"The prompt has {length} tokens; the"
    both = f"{length} prompt tokens + {limit} max_new_tokens exceed the context length of"
    if length == 0:
        return RequestError("The prompt must have at least one token.", "input_ids")
    if length >= context:
        return RequestError(f"{has} context length is {context}.", "input_ids")
    if length + limit > context:
        return RequestError(f"{both} {context}.", "max_new_tokens")
    if length > capacity:
        return RequestError(f"{has} KV cache holds {capacity}.", "input_ids")
    rule = f"logprob_start_len must be <= the prompt's {length} tokens, got {start}."
    return RequestError(rule, "logprob_start_len")


def unknown_ids(vocab_size: int) -> RequestError:
    """A prompt token is not of the vocabulary."""
    return RequestError(f"input_ids must be in [0, {vocab_size}).", "input_ids")
