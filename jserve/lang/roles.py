"""Roles of a conversation as text: what stands before and behind a message, message by message.

The one source is the model's chat template, the same that answers OpenAI's route. A template takes
whole conversations, a program speaks piece by piece; so a conversation of the same roles whose
contents are marks is rendered, and what stands between two marks is what the program adds. Knows
neither tokens nor backends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from jserve.errors import RequestError

Messages = Sequence[Mapping[str, str]]
#: (messages, whether a new assistant message is begun) → the conversation's text. Raises
#: RequestError.
Render = Callable[[Messages, bool], Awaitable[str]]

_BLANK = "\t"  # stands around each mark, to see whether the template cuts blanks off a content


def _mark(number: int) -> str:
    return f"xQmark{number}Qx"


class RoleTemplate:
    """Texts around messages.

    Args:
        stops: strings at which an answer is over, beside the model's own end token.
        reach: what stands around a message depends on so many messages before it, at least one;
            None: on all, so that the whole conversation is rendered for each.
    """

    def __init__(self, render: Render, stops: Sequence[str] = (), reach: int | None = None) -> None:
        self._render, self.stops, self._reach = render, tuple(stops), reach
        self._known: dict[tuple[tuple[str, ...], bool], tuple[list[str], bool]] = {}

    async def begin(self, roles: Sequence[str], role: str) -> str:
        """What a message of `role` adds before its content, behind messages of `roles`. Raises
        RequestError when the model knows no such conversation."""
        near = self._near(roles)
        before = await self._behind(near)
        if role == "assistant" and near:
            texts, _ = await self._texts(near, True)
            opened = _without(texts[-1], before)
            if opened:
                return opened
        texts, _ = await self._around((*near, role))
        return _without(texts[-2], before)

    async def end(self, roles: Sequence[str]) -> str:
        """What stands behind the content of the last of `roles`."""
        return await self._behind(self._near(roles))

    async def trims(self, roles: Sequence[str]) -> bool:
        """Whether blanks around the content of the last of `roles` do not count."""
        return (await self._around(self._near(roles)))[1]

    def _near(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The last of `roles`, as many as matter."""
        return tuple(roles if self._reach is None else roles[-self._reach :])

    async def _behind(self, roles: tuple[str, ...]) -> str:
        if not roles:
            return ""
        texts, _ = await self._around(roles)
        return texts[-1]

    async def _around(self, roles: tuple[str, ...]) -> tuple[list[str], bool]:
        """The last of the texts before, between and behind the contents. A template that refuses to
        end there (a system message alone) gets a user message too; then nothing is known to stand
        behind."""
        try:
            return await self._texts(roles, False)
        except RequestError:
            if roles[-1] == "user":
                raise
            texts, trims = await self._texts((*roles, "user"), False)
            return [*texts[:-2], ""], trims

    async def _texts(self, roles: tuple[str, ...], opened: bool) -> tuple[list[str], bool]:
        """The last three, and whether the last content's blanks were cut off."""
        known = self._known.get((roles, opened))
        if known is None:
            marks = [_mark(i) for i in range(len(roles))]
            contents = [f"{_BLANK}{mark}{_BLANK}" for mark in marks]
            messages = [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ]
            texts, trims = _split(await self._render(messages, opened), marks)
            known = self._known[roles, opened] = texts[-3:], trims
        return known


def _split(text: str, marks: Sequence[str]) -> tuple[list[str], bool]:
    """Texts between `marks`, and whether the last one's blanks were cut off."""
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
    return [*texts, text[end:].removeprefix(_BLANK)], trims


def _without(text: str, before: str) -> str:
    """`text` behind as much of `before` as it begins with."""
    return text[shared_length(text, before) :]


def shared_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    known, most = 0, min(len(one), len(other))
    while known < most:  # half of what is open is compared at a time
        half = (known + most + 1) // 2
        if one[known:half] == other[known:half]:
            known = half
        else:
            most = half - 1
    return known
