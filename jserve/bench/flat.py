"""The calls of a program as requests that know nothing of each other: each with its whole prompt,
none made for the sake of others.

Stands between a program's backend and the engine, so that one program runs flattened and as it is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from jserve.lang.backends.native import Transport
from jserve.lang.roles import RoleTemplate


class FlatTransport:
    """native.py's Transport: calls that only warm the cache are left out, batches come apart.

    Args:
        count: tokens of a text as the engine counts them.
        reuse: whether requests may find each other's prefixes in the cache; else every request has
            a namespace of its own.
    """

    def __init__(self, transport: Transport, count: Callable[[str], int], reuse: bool) -> None:
        self._transport, self._count, self._reuse = transport, count, reuse

    async def generate(self, fields: Mapping[str, Any]) -> Any:
        name = "text" if "text" in fields else "input_ids"
        if isinstance(fields[name], list) and not isinstance(fields[name][0], int):
            each = [self.generate({**fields, name: one}) for one in fields[name]]
            return list(await asyncio.gather(*each))
        if not (fields["sampling_params"]["max_new_tokens"] or fields.get("return_logprob")):
            return self._left_out(fields[name])
        return await self._transport.generate(self._own(fields))

    def stream(self, fields: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        return self._transport.stream(self._own(fields))

    async def template(self) -> RoleTemplate:
        return await self._transport.template()

    async def special_prefix(self) -> str:
        return await self._transport.special_prefix()

    async def encode(self, text: str) -> list[int]:
        return await self._transport.encode(text)

    async def page_size(self) -> int:
        return await self._transport.page_size()

    async def model_info(self) -> dict[str, Any]:
        return await self._transport.model_info()

    async def server_info(self) -> dict[str, Any]:
        return await self._transport.server_info()

    async def flush_cache(self) -> bool:
        return await self._transport.flush_cache()

    async def close(self) -> None:
        await self._transport.close()

    def _own(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields} if self._reuse else {**fields, "cache_salt": uuid.uuid4().hex}

    def _left_out(self, prompt: Any) -> dict[str, Any]:
        """What is said of a call that was not made: its prompt's length, which the caller knows."""
        length = self._count(prompt) if isinstance(prompt, str) else len(prompt)
        meta = {"prompt_tokens": length, "cached_tokens": length}
        return {"text": "", "output_ids": [], "meta_info": meta}
