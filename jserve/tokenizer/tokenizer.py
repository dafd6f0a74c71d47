"""Text ↔ token ids, and messages → ids, for one model.

All decoding follows from the bytes of each token. It imports neither torch nor jax and knows no
requests; where a tokenizer comes from is sources.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import RequestError
from jserve.metrics.timing import UNTIMED, Timing
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.sources import TokenizerSource
from jserve.tokenizer.token_bytes import token_bytes


class Tokenizer:
    """One model's tokenizer. Raises ConfigError when its tokens do not stand alone."""

    def __init__(self, source: TokenizerSource, timing: Timing = UNTIMED) -> None:
        self.source, pipeline = source, source.pipeline
        self._encode = timing.watch("prompt_tokenize_seconds", pipeline.encode_batch_fast)
        self._render = timing.watch("prompt_template_seconds", ChatTemplate.render)
        self._templates = {
            name: ChatTemplate(text, source.special) for name, text in source.templates.items()
        }
        self._bytes, self._leading_blanks = token_bytes(pipeline)
        self.longest_token = max(map(len, self._bytes.values()))  # bytes
        added = pipeline.get_added_tokens_decoder()
        self._skipped = frozenset(i for i, token in added.items() if token.special)
        self.eos_token_ids = tuple(sorted(set(source.eos_token_ids)))
        bos = source.special.get("bos_token")
        self.bos_token_id = None if bos is None else pipeline.token_to_id(bos)
        self.vocab_size = pipeline.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_hash(self) -> str | None:
        """SHA-256 of the default chat template."""
        return self._templates["default"].hash if "default" in self._templates else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, special tokens in it too; `add_special`: with BOS and EOS."""
        try:
            return self._encode([text], add_special_tokens=add_special)[0].ids
        except TypeError:
            raise RequestError("text must not hold lone surrogates.", "text") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.pieces(ids, skip_special_tokens))
        for _ in range(self._leading_blanks):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]:
        """The bytes that each id adds to a text that goes on, b"" for skipped ones."""
        skipped = self._skipped if skip_special_tokens else ()
        return [b"" if i in skipped else self._bytes.get(i, b"") for i in ids]

    def id_to_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def id_to_text(self, token_id: int) -> str:
        """The token alone, special or not; what is not UTF-8 by itself shows as U+FFFD."""
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Ids of the rendered messages. `options`: add_generation_prompt, continue_final_message,
        and variables of the template (tools, enable_thinking …); see ChatTemplate.render.

        Raises RequestError when there is no template, or the template refuses the messages.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            remedy = "give --chat-template or use /v1/completions."
            raise RequestError(f"this model has no chat template; {remedy}", "messages")
        text = self._render(self._templates[name], messages, **options)
        return self.encode(text, add_special=False)
