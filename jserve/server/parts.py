"""Content parts of a chat message, of which there is only text yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jserve.errors import RequestError
from jserve.server.protocol import Body, convert


class TextPart(Body):
    type: Literal["text"]
    text: str


def joined_text(parts: Sequence[dict[str, Any]], at: str) -> str:
    """The texts joined by a space; `at` is the path of the parts. Raises RequestError."""
    texts = []
    for index, part in enumerate(parts):
        where = f"{at}[{index}]"
        kind = part.get("type", "text")
        if kind != "text":
            raise RequestError(f"{where}.type {kind!r} is not supported yet.", f"{where}.type")
        texts.append(convert(part, TextPart, where).text)
    return " ".join(texts)
