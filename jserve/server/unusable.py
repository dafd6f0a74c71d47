"""Chats that cannot be answered, in words. Decides nothing: see chat.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jserve.errors import RequestError

#: Names in chat_template_kwargs that no template gets: those of the body's own fields, which may
#: refuse them, and those that transformers' call of a template takes for itself.
RESERVED = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "messages", "self", "tools"),
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


def unusable(messages: Sequence[Mapping[str, Any]], taken: Set[str]) -> RequestError:
    """Messages that the chat template cannot take; `taken`: variables of it that are not the
    caller's to set."""
    if not messages:
        return RequestError("messages must hold at least one message.", "messages")
    if taken:
        name = f"chat_template_kwargs.{min(taken)}"
        return RequestError(f"{name} cannot be set this way.", name)
    message = "continue_final_message needs a last message of role assistant."
    return RequestError(message, "continue_final_message")


def bad_message(role: str, at: str) -> RequestError:
    if role in ("tool", "function"):
        return RequestError(f"{at}.role: role {role} is not supported yet.", f"{at}.role")
    return RequestError(f"{at}.content is required.", f"{at}.content")


def bad_limit(old: int | None, new: int | None) -> RequestError:
    """max_tokens and max_completion_tokens, its new name, of which one at most may be None."""
    if None not in (old, new) and old != new:
        message = "max_tokens and max_completion_tokens differ; give one."
        return RequestError(message, "max_tokens")
    name, limit = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    return RequestError(f"{name} must be >= 1, got {limit}.", name)
