"""How a trace ends a function that would go on: at once, and however the function takes it.

Owns the exception that stops it, the count of what it did, its time, and the thread that it runs
in; knows nothing of programs.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import NoReturn

from jserve.lang.site import Site, innermost

#: So often a function may catch that it was stopped and go on, before it is left behind.
MOST_SWALLOWED = 100
#: Seconds that an interrupted function has to end, and how often it is.
_GRACE, _INTERRUPTS = 0.1, 10


class Stopped(BaseException):
    """Ends a traced function. A program's `except Exception` is for its own mistakes: it does not
    catch this."""


class Bounds:
    """Of one traced function, with its branches and the programs that it calls. `why` says how it
    went beyond them; None while it has not. `stopped` is the line where it was.

    Args:
        most: so many operations it may do.
        seconds: so long it may take, whatever it does.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.why: str | None = None
        self.stopped: Site | None = None
        self._most, self._seconds = most, seconds
        self._done = self._swallowed = 0
        self._stopped = self._left_behind = False
        self._over, self._ending = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def count(self, operations: int = 1) -> None:
        """The function does these. Raises Stopped when it must not, as always from then on."""
        if self._stopped:
            self._swallowed += 1
            if self._swallowed > MOST_SWALLOWED:
                self.why = "it catches every exception and goes on"
                self._leave_behind()
            raise Stopped
        self._done += operations
        if self._done > self._most:
            self.why = f"it did {self._most:,} things and went on"
            self.stop()

    def stop(self) -> NoReturn:
        self._stopped = True
        raise Stopped

    def run(self, function: Callable[[], object]) -> None:
        """Call it, until it ends or has to be left behind. Raises what it raises, but Stopped."""
        failed: list[BaseException] = []

        def work() -> None:
            with contextlib.suppress(Stopped):  # it comes again where this is slow
                try:
                    function()
                except Stopped as stopped:
                    self.stopped = innermost(stopped)
                except BaseException as error:  # told to who waits
                    failed.append(error)
            with contextlib.suppress(Stopped):  # and may be on its way even now
                self._end()
            self._end()

        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(work,), name="jserve-trace", daemon=True
        )
        self._thread.start()
        try:
            if not self._over.wait(self._seconds):
                self._interrupt()
        except BaseException:  # an interrupt
            self._stopped = True
            raise
        if not self._left_behind:
            self._thread.join()
        if failed:
            raise failed[0]

    def _interrupt(self) -> None:
        """It may never come back to `count`: raise Stopped where it is. What waits for something,
        or catches that too, is left behind, and ends when it does anything more."""
        self.why = f"it took longer than {self._seconds:g} s"
        self._stopped = True
        assert self._thread is not None and self._thread.ident is not None
        at, what = ctypes.c_ulong(self._thread.ident), ctypes.py_object(Stopped)
        for _ in range(_INTERRUPTS):
            with self._ending:
                if not self._over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(at, what)
            if self._over.wait(_GRACE) or not self._thread.is_alive():
                return
        self._left_behind = True

    def _end(self) -> None:
        """From here on nothing more is raised in the thread."""
        with self._ending:
            self._over.set()

    def _leave_behind(self) -> None:
        """Nothing ends a thread that catches everything: it stands still from here on."""
        self._left_behind = True
        self._over.set()
        if threading.current_thread() is self._thread:
            threading.Event().wait()
