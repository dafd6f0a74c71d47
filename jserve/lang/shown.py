"""How Python shows what has no text: repr() is for people, and may not become a part of a prompt.

Each is shown with a mark, of this process alone, by which text that holds it is refused.
"""

from __future__ import annotations

import secrets

from jserve.lang.errors import ExpressionError
from jserve.types.wording import lone_surrogate

_LONGEST = 80  # characters of a text, in a message
_BEGIN, _MARK = "<jserve: ", f" #{secrets.token_hex(6)}>"


def shown(words: str) -> str:
    """A repr() of what `words` say."""
    return f"{_BEGIN}{words}{_MARK}"


def check_text(text: str) -> None:
    """Raises ExpressionError where Python has written an object of the language into a text, and
    for one that no server can be sent."""
    if _MARK in text:
        what = text[: text.index(_MARK)].rpartition(_BEGIN)[2]
        raise ExpressionError(
            f"{what} has no text before it is run, but a text holds its repr(): put it beside "
            "text with +, not into a text by !r, %r, repr() or a list's str()."
        )
    if lone_surrogate(text):
        shown = repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")
        raise ExpressionError(
            f"a text holds half of a surrogate pair, which nothing reads: {shown}."
        )
