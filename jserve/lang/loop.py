"""The event loop, in a thread of its own, on which a backend's calls and its programs run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jserve.lang.errors import BackendError

_T = TypeVar("_T")


class LoopThread:
    """Started by the first use, ended for good by `close`, or when nobody holds it any more."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run it; cancelling the future cancels it. Raises BackendError when the loop is closed."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise BackendError("the backend was shut down")
            return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it and wait. An interrupt cancels it."""
        assert threading.current_thread() is not self._thread, "a call from the loop to itself"
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call it on the loop, in order, with the context variables of now; False when the loop is
        closed."""
        context = contextvars.copy_context()
        with self._lock:
            if not self._closed:
                self._running().call_soon_threadsafe(function, *arguments, context=context)
            return not self._closed

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, and wait for that. What was asked for before is begun before, and
        `last` is done before. Later calls do nothing."""
        if last is not None and not self._closed:
            self.call(last())
        with self._lock:
            self._closed = True
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=(self._loop,), name="jserve-lang", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _stop, self._loop)
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
