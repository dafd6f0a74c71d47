"""Messages that the chat template cannot take, in words. Decides nothing: see chat.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jserve.errors import RequestError


def unusable(messages: Sequence[Mapping[str, Any]], taken: Set[str]) -> RequestError:
    """`taken`: variables of the template that are not the caller's to set."""
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
