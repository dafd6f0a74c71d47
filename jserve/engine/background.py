"""An event loop in a thread of its own, for synchronous calls."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from jserve.engine.life import FORKED
from jserve.errors import EngineDeadError

_T = TypeVar("_T")
_PATIENCE = 2.0  # seconds for what runs at the program's end to be cancelled


class BackgroundLoop:
    """Started by the first call; ends when nobody holds it any more, so that a call after the
    engine's end still gets its error, or with the program. Its callers are threads that run no
    event loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Raises EngineDeadError where its thread is not: in a forked process, and when the program
        is ending."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after an interrupt the request must not go on
            raise

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """The items one by one; leaving early closes the generator, before the next call runs."""
        end: Any = object()

        async def step() -> _T:
            return await anext(items, end)

        try:
            while (item := self.call(step())) is not end:
                yield item
        finally:
            self._close(items)

    def _running(self) -> asyncio.AbstractEventLoop:
        if os.getpid() != self._pid:
            raise EngineDeadError(FORKED)
        with self._lock:
            if self._loop is None:
                self._loop, end = _start()
                weakref.finalize(self, end).atexit = False
            if self._loop.is_closed():
                raise EngineDeadError("the program is ending")
            return self._loop

    def _close(self, items: AsyncGenerator[Any, None]) -> None:
        """Nobody waits for it: the collector may call this in any thread, the loop's own too, and
        so may the interpreter once that thread runs no more."""
        if self._loop is not None and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and closed them
                self._loop.call_soon_threadsafe(_begin, self._loop, items)


def _begin(loop: asyncio.AbstractEventLoop, items: AsyncGenerator[Any, None]) -> None:
    """On the loop: a coroutine made elsewhere, and never run, would be complained of."""
    loop.create_task(_closed(items))


async def _closed(items: AsyncGenerator[Any, None]) -> None:
    with contextlib.suppress(Exception):  # it ends, or is ending; nobody wants its error
        await items.aclose()


def _start() -> tuple[asyncio.AbstractEventLoop, Callable[[], None]]:
    """A loop that runs in a thread, and what ends it without waiting for that."""
    started: concurrent.futures.Future[Any] = concurrent.futures.Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        started.set_result((loop, functools.partial(loop.call_soon_threadsafe, stop.set)))
        await stop.wait()

    # asyncio.run ends tasks and generators, then closes the loop
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="jserve-calls", daemon=True)
    thread.start()
    loop, stop = started.result()

    def end() -> None:
        atexit.unregister(end_with_program)
        with contextlib.suppress(RuntimeError):  # it was closed
            stop()

    def end_with_program() -> None:
        """Before daemon threads stand still: none of its tasks may be left half-way."""
        end()
        thread.join(_PATIENCE)

    atexit.register(end_with_program)
    return loop, end
