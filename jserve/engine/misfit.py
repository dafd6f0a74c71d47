"""Prompts that cannot be served, in words for their sender. Decides nothing: see submission.py."""

from __future__ import annotations

from jserve.errors import RequestError


def misfit(field: str, ids: list[int], wanted: int, vocab_size: int, context: int) -> RequestError:
    """What is wrong with a prompt of `field`, of which `wanted` tokens are to follow."""
    length = len(ids)
    if length == 0:
        return no_prompt(field)
    if length >= context:  # first: a long list is not to be looked through
        message = f"The prompt has {length} tokens, but the context length is {context}."
        return RequestError(message, field)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        return RequestError(f"{field} must hold ids in [0, {vocab_size}).", field)
    why = f"{length} prompt tokens + {wanted} new tokens > context length {context}."
    return RequestError(f"max_new_tokens (or its default) is too large: {why}", "max_new_tokens")


def no_prompt(field: str) -> RequestError:
    return RequestError(f"{field} must hold at least one token.", field)


def too_long(text: str, context: int, field: str = "text") -> RequestError:
    """A text that is not worth tokenizing."""
    message = f"{field} has {len(text)} characters, too many for a context of {context} tokens."
    return RequestError(message, field)
