"""What an answer's syntax must be, as it is written and as it is carried to the engine."""

from __future__ import annotations

import msgspec


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is json (a schema), regex, ebnf or structural_tag; `text` is written in it."""

    kind: str
    text: str


class CompiledSpec(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """A spec that was compiled; `payload` is what the backend made of it, for its own `load`."""

    spec: GrammarSpec
    payload: bytes


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an answer that come before its grammar: up to and with the run `end`.

    `begin` is the token that the answer must open them with; None where they have begun already.
    """

    end: tuple[int, ...]
    begin: int | None = None
