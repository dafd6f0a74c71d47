"""The last message left open for the model to go on with: what a template puts behind is cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import RequestError

#: Stands at the end of the message while it is rendered, and is cut off with all behind it.
_MARK = "\ue000continue\ue001"


def mark_last(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> list[Mapping[str, Any]]:
    """A copy whose last message ends with the mark; RequestError when it has no text, or the
    request wants a new message begun as well.
    """
    if add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other."
        raise RequestError(message, "continue_final_message")
    last = copy.deepcopy(dict(messages[-1])) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK
    elif content and isinstance(content[-1], dict) and "text" in content[-1]:
        content[-1]["text"] += _MARK
    else:
        raise RequestError("continue_final_message needs a last message with text.", "messages")
    return [*messages[:-1], last]


def cut_at_mark(text: str) -> str:
    """The rendered text up to the mark; RequestError when the template left it out."""
    end = text.rfind(_MARK)
    if end < 0:
        message = "the chat template does not show the last message, so it cannot be continued."
        raise RequestError(message, "continue_final_message")
    return text[:end]
