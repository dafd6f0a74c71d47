"""How models mark their reasoning, and when they reason at all, by the names that SGLang gives it.

Knows texts and variables of chat templates; neither tokens nor requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jserve.parsers.reasoning.think_tags import BEGIN, END


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`thinks_at_once`: a model of this kind begins to think without saying so.

    `switch` is the variable of its chat template that turns thinking on or off, `usual` what it is
    without one; without a switch a model always thinks.
    """

    thinks_at_once: bool
    switch: str = ""
    usual: bool = True
    begin: str = BEGIN
    end: str = END

    def thinks(self, variables: Mapping[str, Any]) -> bool:
        """Whether a chat with these variables lets it think; a switch holds true or false."""
        value = variables.get(self.switch)
        return value if isinstance(value, bool) else self.usual

    def begun(self, prompt: bytes) -> bool | None:
        """Whether the end of a prompt has begun the thinking (True), has ended it (False), or
        leaves it to the answer (None)."""
        text = prompt.rstrip()
        if text.endswith(self.begin.encode()):
            return True
        return False if text.endswith(self.end.encode()) else None


FORMATS: Mapping[str, Format] = {
    "deepseek-r1": Format(thinks_at_once=True),
    "deepseek-v3": Format(thinks_at_once=False, switch="thinking", usual=False),
    "qwen3": Format(thinks_at_once=False, switch="enable_thinking"),
    "qwen3-thinking": Format(thinks_at_once=True),
}
