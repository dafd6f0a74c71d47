"""Where the grammar of an answer begins that thinks first: a format of reasoning in tokens.

Owns what --reasoning-parser needs of the model's tokenizer. Which requests must reason is their
caller's to say, and how texts are split is parsers/reasoning's.
"""

from __future__ import annotations

from collections.abc import Sequence

from jserve.errors import ConfigError
from jserve.parsers.reasoning import FORMATS, Format
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Thinking

_NUM_LAST = 16  # tokens of a prompt that may hold a tag and blanks behind it


class Reasoner:
    """Args:
    name: of a format, as --reasoning-parser takes it.
    model_path: what the tokenizer belongs to, for errors.

    Raises ConfigError for a model that cannot write its tags.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, model_path: str) -> None:
        self._format, self._tokenizer = FORMATS[name], tokenizer
        begin, self._end = self._tag(self._format.begin), self._tag(self._format.end)
        wrong = f"--reasoning-parser {name} does not go with --model-path {model_path}"
        if not self._end:
            raise ConfigError(f"{wrong}: its texts cannot hold {self._format.end}")
        if not self._format.thinks_at_once and len(begin) != 1:
            raise ConfigError(f"{wrong}, which has no token for {self._format.begin}")
        self._begin = None if self._format.thinks_at_once else begin[0]

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking | None:
        """What comes before the grammar of an answer to this prompt; None when it is over."""
        begun = prompt_begun(self._format, self._tokenizer, prompt_ids)
        if begun is False:
            return None
        return Thinking(end=self._end, begin=None if begun else self._begin)

    def _tag(self, tag: str) -> tuple[int, ...]:
        """Its tokens; none where texts would not show it."""
        ids = self._tokenizer.encode(tag, add_special=False)
        shown = b"".join(self._tokenizer.pieces(ids, skip_special_tokens=True))
        return tuple(ids) if shown == tag.encode() else ()


def prompt_begun(form: Format, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool | None:
    """Format.begun of a prompt in tokens."""
    last = tokenizer.pieces(prompt_ids[-_NUM_LAST:], skip_special_tokens=False)
    return form.begun(b"".join(last))
