"""What SIGINT and SIGTERM do to a server: the first asks it to end, a second SIGINT makes it.

Knows nothing of requests: who asks what they are waited for says so.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, NoReturn

import uvicorn

STATUS = 130  # of a process that was interrupted
_POLL = 0.05  # seconds between looks for a second SIGINT
_PATIENCE = 1.0  # seconds for what remains to be put away once nothing is waited for
_FORCED = b"jserve: interrupted again; ended at once, open requests are lost\n"


class Signals:
    """Of the one server of this process, whose main thread makes it.

    NOTE: uvicorn takes both signals itself while it serves, then raises them once more: so they
    are handled here too, and a server that was asked to end has exit status 0.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        self._server, self._interrupts = server, 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    async def finish(self, work: Awaitable[None], put_away: Callable[[], Any]) -> None:
        """Await `work`, the end of all. A second SIGINT ends the process meanwhile: its children
        are killed, then `put_away` is called in a thread."""
        tasks = [asyncio.ensure_future(work)]
        while not tasks[0].done():
            if self._server.force_exit or self._interrupts > 1:
                self._server.force_exit = True
                _say_and_kill()
                tasks.append(asyncio.create_task(asyncio.to_thread(put_away)))
                await asyncio.wait(tasks, timeout=_PATIENCE)
                os._exit(STATUS)
            await asyncio.wait(tasks, timeout=_POLL)
        signal.signal(signal.SIGINT, _end)  # the process may have threads yet to wait for
        tasks[0].result()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._server.should_exit = True
        self._interrupts += number == signal.SIGINT


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _say_and_kill()
    os._exit(STATUS)


def _say_and_kill() -> None:
    logging.disable()  # what is cut off now is no fault
    os.write(2, _FORCED)  # not through a file that may be in the middle of a line
    for child in multiprocessing.active_children():
        child.kill()
