"""Programs on an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from jserve.engine.engine import Engine
from jserve.engine.flush import flush_when_idle
from jserve.lang.backends.native import NativeBackend
from jserve.lang.named_templates import named_template
from jserve.lang.roles import Messages, Roles, RoleTemplate
from jserve.tokenizer.chat_template import ChatTemplate


class EngineBackend(NativeBackend):
    """`shutdown` leaves the engine to who made it."""

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        super().__init__(EngineTransport(engine, chat_template_name))


class EngineTransport:
    """native.py's Transport to an engine in this process."""

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        self._engine, self._template_name = engine, chat_template_name
        if chat_template_name is not None:
            named_template(chat_template_name)  # a wrong name is told at once

    async def generate(self, fields: Mapping[str, Any]) -> Any:
        return await self._engine.async_generate(**_arguments(fields))

    async def stream(self, fields: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(
            await self._engine.async_generate(**_arguments(fields))
        ) as bodies:
            async for body in bodies:
                yield body

    async def template(self) -> RoleTemplate:
        tokenizer = self._engine.tokenizer
        if self._template_name is not None or not tokenizer.has_chat_template:
            return named_template(self._template_name or "default")

        async def render(messages: Messages, opened: bool) -> str:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=opened)
            return tokenizer.decode(ids, skip_special_tokens=False)

        source = tokenizer.source
        chat = ChatTemplate(source.templates["default"], source.special)

        async def ends(roles: Roles, opened: bool) -> str:
            """Without the tokens of the middle, which cost far more than its text."""
            text = roles.cut(chat.render(roles.messages(), add_generation_prompt=opened))
            ids = tokenizer.encode(text, add_special=False)
            return tokenizer.decode(ids, skip_special_tokens=False)

        return RoleTemplate(render, ends=ends)

    async def special_prefix(self) -> str:
        tokenizer = self._engine.tokenizer
        return tokenizer.decode(tokenizer.encode("", add_special=True), skip_special_tokens=False)

    async def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    async def page_size(self) -> int:
        return int(self._engine.server_info["page_size"])

    async def model_info(self) -> dict[str, Any]:
        return {"model_path": self._engine.config.model.model_path}

    async def server_info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._engine.get_server_info)

    async def flush_cache(self) -> bool:
        return (await flush_when_idle(self._engine.control, 0.0)).ok

    async def close(self) -> None:
        return None


def _arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """/generate's fields as Engine.async_generate names them."""
    arguments = dict(fields)
    if "text" in arguments:
        arguments["prompt"] = arguments.pop("text")
    return arguments
