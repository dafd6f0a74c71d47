"""Roles of a conversation as text: what stands before and behind a message, message by message.

The one source is the model's chat template, the same that answers OpenAI's route. A template takes
whole conversations, a program speaks piece by piece; so a conversation of the same roles whose
contents are marks is rendered, and what stands between two marks is what the program adds. Knows
neither tokens nor backends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from jserve.errors import RequestError

Messages = Sequence[Mapping[str, str]]
#: (messages, whether a new assistant message is begun) → the conversation's text. Raises
#: RequestError.
Render = Callable[[Messages, bool], Awaitable[str]]
#: As Render, of the conversation of some roles, whose middle may be left out.
RenderEnds = Callable[["Roles", bool], Awaitable[str]]
#: The last three of the texts before, between and behind the contents, and whether the last
#: content's blanks were cut off.
_Around: TypeAlias = tuple[list[str], bool]

_BLANK = "\t"  # stands around each mark, to see whether the template cuts blanks off a content
#: Messages at both ends that a cut conversation shows, and the shortest that is worth it.
_FIRST, _LAST, _WORTH = 3, 4, 12


class Roles:
    """Roles of a conversation's messages, in order: a longer one shares what was before, and the
    same ones behind the same are the same object. With what is known of how they look."""

    __slots__ = ("_next", "around", "before", "first", "mark", "message", "num", "role")

    def __init__(self, before: Roles | None = None, role: str = "") -> None:
        self.before, self.role = before, role
        self.num = 0 if before is None else before.num + 1
        self.mark = f"xQmark{self.num - 1}Qx"  # stands for the last content
        self.message = {"role": role, "content": f"{_BLANK}{self.mark}{_BLANK}"}
        self.first: tuple[Roles, ...] = () if before is None else before.first
        if before is not None and self.num <= _FIRST:
            self.first = (*self.first, self)
        self.around: dict[bool, _Around] = {}
        self._next: dict[str, Roles] = {}

    def then(self, *roles: str) -> Roles:
        found = self
        for role in roles:
            known = found._next
            if role not in known:
                known[role] = Roles(found, role)
            found = known[role]
        return found

    def last(self, count: int) -> list[Roles]:
        """As they were at each of the last `count` messages, or at all."""
        found, roles = [], self
        while roles.before is not None and len(found) < count:
            found.append(roles)
            roles = roles.before
        return found[::-1]

    def messages(self) -> list[Mapping[str, str]]:
        """The conversation, of marks."""
        return [one.message for one in self.last(self.num)]

    def ends(self) -> list[Roles]:
        """As they were at each message that is shown where the middle is left out."""
        return [*self.first, *self.last(_LAST)]

    def cut(self, text: str) -> str:
        """The text of the whole conversation, without the middle."""
        marks = [one.mark for one in self.ends()]
        begin, end = text.find(marks[_FIRST - 1]), text.find(marks[_FIRST])
        return text[: begin + len(marks[_FIRST - 1])] + text[end:] if 0 <= begin < end else text


class RoleTemplate:
    """Texts around messages.

    Args:
        stops: strings at which an answer is over, beside the model's own end token.
        reach: what stands around a message depends on so many messages before it, at least one;
            None: on all.
        ends: renders a long conversation in place of `render`, as long as both agree, which is
            looked at again at each doubling.
    """

    def __init__(
        self,
        render: Render,
        stops: Sequence[str] = (),
        reach: int | None = None,
        ends: RenderEnds | None = None,
    ) -> None:
        self._render, self.stops, self._reach = render, tuple(stops), reach
        self._ends = ends
        self.none = Roles()  # of a conversation that has not begun

    async def begin(self, roles: Roles, role: str) -> str:
        """What a message of `role` adds before its content, behind messages of `roles`. Raises
        RequestError when the model knows no such conversation."""
        near = self._near(roles)
        before = await self._behind(near)
        if role == "assistant" and near.num:
            texts, _ = await self._texts(near, True)
            opened = _without(texts[-1], before)
            if opened:
                return opened
        texts, _ = await self._around(near.then(role))
        return _without(texts[-2], before)

    async def end(self, roles: Roles) -> str:
        """What stands behind the content of the last of `roles`."""
        return await self._behind(self._near(roles))

    async def trims(self, roles: Roles) -> bool:
        """Whether blanks around the content of the last of `roles` do not count."""
        return (await self._around(self._near(roles)))[1]

    def _near(self, roles: Roles) -> Roles:
        """The last of `roles`, as many as matter."""
        if self._reach is None:
            return roles
        return self.none.then(*(one.role for one in roles.last(self._reach)))

    async def _behind(self, roles: Roles) -> str:
        if not roles.num:
            return ""
        texts, _ = await self._around(roles)
        return texts[-1]

    async def _around(self, roles: Roles) -> _Around:
        """A template that refuses to end there (a system message alone) gets a user message too;
        then nothing is known to stand behind."""
        try:
            return await self._texts(roles, False)
        except RequestError:
            if roles.role == "user":
                raise
            texts, trims = await self._texts(roles.then("user"), False)
            return [*texts[:-2], ""], trims

    async def _texts(self, roles: Roles, opened: bool) -> _Around:
        known = roles.around.get(opened)
        if known is None:
            known = roles.around[opened] = await self._found(roles, opened)
        return known

    async def _found(self, roles: Roles, opened: bool) -> _Around:
        near = await self._near_ends(roles, opened)
        if near is not None and roles.num & (roles.num - 1):
            return near
        text = await self._render(roles.messages(), opened)
        found = _split(text, [one.mark for one in roles.last(roles.num)])
        if near not in (None, found):
            self._ends = None
        return found

    async def _near_ends(self, roles: Roles, opened: bool) -> _Around | None:
        """None where the whole conversation has to be looked at: also where none is known to be
        right that ends with a message which is shown, because what is not shown was never seen."""
        if self._ends is None or roles.num < _WORTH:
            return None
        ends = roles.ends()
        if not any(one.around for one in ends[_FIRST:]):
            return None
        try:
            return _split(await self._ends(roles, opened), [one.mark for one in ends])
        except RequestError:
            return None


def _split(text: str, marks: Sequence[str]) -> _Around:
    """The last three texts around `marks`, and whether the last one's blanks were cut off."""
    texts, trims, end = [], True, 0
    for mark in marks:
        begin = text.find(mark, end)
        if begin < 0:
            why = "the chat template does not show every message, or not in its order."
            raise RequestError(why, "messages")
        before = text[end:begin]
        trims = not before.endswith(_BLANK)
        if texts:
            before = before.removeprefix(_BLANK)
        texts.append(before.removesuffix(_BLANK))
        end = begin + len(mark)
    return [*texts[-2:], text[end:].removeprefix(_BLANK)], trims


def _without(text: str, before: str) -> str:
    """`text` behind as much of `before` as it begins with."""
    return text[shared_length(text, before) :]


def shared_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    known, most = 0, min(len(one), len(other))
    if one.startswith(other) or other.startswith(one):
        return most
    while known < most:  # half of what is open is compared at a time
        half = (known + most + 1) // 2
        if one[known:half] == other[known:half]:
            known = half
        else:
            most = half - 1
    return known
