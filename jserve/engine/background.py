"""An event loop in a thread of its own, for synchronous calls."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class BackgroundLoop:
    """Started by the first call; ends when nobody holds it any more, so that a call after the
    engine's end still gets its error. Its callers are threads that run no event loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
                weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after an interrupt the request must not go on
            raise

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """The items one by one; leaving early closes the generator."""
        end: Any = object()

        async def step() -> _T:
            return await anext(items, end)

        async def close() -> None:
            await items.aclose()

        try:
            while (item := self.call(step())) is not end:
                yield item
        finally:
            self.call(close())
