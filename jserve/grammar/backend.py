"""What every grammar backend does. The work is in the files named after them."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from jserve.types import GrammarSpec


class GrammarError(Exception):
    """A grammar that cannot be enforced; the message says why and, if known, where."""


class GrammarUnavailable(GrammarError):
    """One that was not compiled, for reasons that are not its own: it may be tried again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar knows of a model's tokens.

    `tokens` are the bytes that each id adds to a text, empty for special tokens and for ids beyond
    the tokenizer's; `size` is the width of the logits; `eos_ids` may come where a grammar can end.
    """

    tokens: tuple[bytes, ...]
    size: int
    eos_ids: tuple[int, ...]

    @property
    def words(self) -> int:
        """int32 words in a packed mask."""
        return -(-self.size // 32)


class Matcher(Protocol):
    """How far one answer has come in its grammar."""

    @property
    def finished(self) -> bool:
        """Nothing may follow but the end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and unchanged, when the grammar does not allow it."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write the allowed next tokens into int32[words], bit i of word w is token 32·w + i."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the latest accepted tokens."""
        ...

    def forced(self) -> bytes:
        """The text that must come next."""
        ...


class Template(Protocol):
    """A loaded grammar, from which each answer gets a Matcher of its own."""

    def fork(self) -> Matcher: ...


class Backend(Protocol):
    """`compile` runs in a worker process, `load` where tokens are masked."""

    def prepare(self, kind: str) -> None:
        """Import what grammars of this kind need; may take seconds."""
        ...

    def compile(self, spec: GrammarSpec) -> bytes:
        """Raises GrammarError."""
        ...

    def load(self, payload: bytes) -> Template: ...
