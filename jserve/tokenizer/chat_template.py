"""A model's chat template: messages → the prompt text. It knows nothing of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.tokenizer.continuation import cut_at_mark, mark_last
from jserve.tokenizer.template_dialect import compile_template, refusal


class ChatTemplate:
    """One compiled template; `variables` are what every template may name: bos_token and so on."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.hash = hashlib.sha256(source.encode()).hexdigest()
        self._variables = {"tools": None, "documents": None, **variables}
        self._template = compile_template(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. Raises RequestError when the template refuses or cannot take the messages."""
        if continue_final_message:
            messages = mark_last(messages, add_generation_prompt)
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render({**self._variables, **variables, **own})
        except Exception as error:  # a template is code of others, and may raise anything
            raise refusal(error) from None
        return cut_at_mark(text) if continue_final_message else text
