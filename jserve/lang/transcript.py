"""The conversation that a program writes: its text, and its messages as OpenAI's API has them.

Owns roles, which one is open and what belongs to it; where text goes, and how a role looks as text,
is for others to say.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jserve.lang.board import Board
from jserve.lang.errors import ExpressionError
from jserve.lang.roles import Roles, RoleTemplate


@dataclasses.dataclass(slots=True)
class Transcript:
    """Written by one executor. The text itself is the board's."""

    board: Board
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    roles: Roles | None = None  # of the messages, since the first one
    role: str | None = None
    _opened_at: int = 0  # where the open role's content begins in the text
    _trims: bool = False  # the template cuts blanks off the open role's content
    _held: str = ""  # blanks at its end, which count only when something follows

    def branch(self, board: Board) -> Transcript:
        """A copy that goes on by itself on `board`."""
        return dataclasses.replace(self, board=board, messages=list(self.messages))

    @property
    def opened(self) -> str:
        """The open role's text so far."""
        return self.board.since(self._opened_at) if self.role is not None else ""

    def write(self, text: str) -> None:
        if self._trims:
            text = self._held + text
            if self.board.length == self._opened_at:
                text = text.lstrip()
            kept = text.rstrip()
            self._held, text = text[len(kept) :], kept
        self.board.write(text)

    def settle(self) -> None:
        """The model goes on from here: blanks that were held back count."""
        held, self._held = self._held, ""
        self.board.write(held)

    async def begin(self, role: str, template: RoleTemplate) -> None:
        """Raises ExpressionError inside another role, RequestError when the template refuses."""
        if self.role is not None:
            raise ExpressionError(f"{role} begins inside {self.role}; end that first.")
        roles = self.roles or template.none
        self.board.write(await template.begin(roles, role))
        self.role, self._opened_at = role, self.board.length
        self._trims = await template.trims(roles.then(role))

    async def end(self, role: str, template: RoleTemplate) -> None:
        if self.role != role:
            raise ExpressionError(f"{role} ends, but the open role is {self.role}.")
        content = self.opened
        self.messages.append({"role": role, "content": content})
        self.roles = (self.roles or template.none).then(role)
        self.role, self._trims, self._held = None, False, ""
        self.board.write(await template.end(self.roles))
