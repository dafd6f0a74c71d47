"""What a program has produced so far, where threads and event loops wait for more of it.

Owns text, variables, their meta information, and the end of the program, good or bad; every wait
ends with one of them. Knows nothing of expressions or backends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

from jserve.lang.errors import ExpressionError
from jserve.lang.growing import GrowingText
from jserve.types.wording import written

_T = TypeVar("_T")
#: Of meta information: lists that grow with the text.
LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_NOTHING: Any = object()


class Board:
    """Written by one program, read by any thread.

    Args:
        streaming: whether readers get text as it comes, or once.
        open_names: a name that nobody has declared may still come (somebody else runs the program).
    """

    def __init__(
        self,
        streaming: bool = False,
        open_names: bool = False,
        text: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.streaming = streaming
        self._open_names = open_names
        #: The thread whose reads must not wait for what it has to write itself.
        self._writer = None if open_names else threading.get_ident()
        self._text = GrowingText(text)
        self._values: dict[str, Any] = dict(values or {})
        self._meta: dict[str, Any] = {}
        self._declared = dict.fromkeys(self._values)  # in order
        self._pieces: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._pending = 0
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._watchers: set[Callable[[], None]] = set()

    # Writing.

    def _change(self, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            for watcher in tuple(self._watchers):
                watcher()

    def adopt(self) -> None:
        """From now on the current thread is the program's."""
        self._writer = threading.get_ident()

    def declare(self, names: Iterable[str]) -> None:
        """The program has these variables, but they will not come any more."""
        self._change(lambda: self._declared.update(dict.fromkeys(names)))

    def expect(self, names: Iterable[str]) -> None:
        """One more expression is under way, which will set `names`."""

        def change() -> None:
            self._pending += 1
            for name in names:
                self._declared[name] = None
                self._values.pop(name, None)  # read again, it waits for the new value
                self._meta.pop(name, None)
                self._pieces.pop(name, None)

        self._change(change)

    def done_one(self) -> None:
        def change() -> None:
            self._pending -= 1

        self._change(change)

    def write(self, delta: str) -> None:
        if delta:
            self._change(lambda: self._text.add(delta))

    def grow(self, name: str, delta: str, meta: dict[str, Any]) -> None:
        """A piece of a variable's value, with the meta information of this piece."""
        self._change(lambda: self._pieces.setdefault(name, []).append((delta, meta)))

    def put(self, name: str, value: Any, meta: Any = None) -> None:
        """A variable's value, whole."""

        def change() -> None:
            self._declared[name] = None
            self._values[name] = value
            if meta is not None:
                self._meta[name] = meta

        self._change(change)

    def fail(self, error: BaseException) -> None:
        """The program ends here; the first error stays."""

        def change() -> None:
            self._error = error if self._error is None else self._error

        self._change(change)

    def end(self) -> None:
        def change() -> None:
            self._ended = True

        self._change(change)

    # Reading.

    @property
    def text(self) -> str:
        with self._changed:
            return self._text.whole

    @property
    def length(self) -> int:
        """Characters of the text."""
        return len(self._text)

    def since(self, position: int) -> str:
        """The text behind its first `position` characters."""
        with self._changed:
            return self._text.since(position)

    @property
    def values(self) -> dict[str, Any]:
        """Those that are whole."""
        with self._changed:
            return dict(self._values)

    @property
    def declared(self) -> list[str]:
        with self._changed:
            return list(self._declared)

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def ended(self) -> bool:
        return self._ended

    def declares(self, name: str) -> bool:
        return name in self._declared

    def value(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a variable. Raises the program's error when it never came, KeyError when the
        program has no such variable, TimeoutError after `timeout` seconds."""
        return self._wait(lambda: self._look(name), f"variable {name!r}", timeout)

    def meta(self, name: str, timeout: float | None = None) -> Any:
        """As `value`, of its meta information; None for one that was set by the program."""
        self.value(name, timeout)
        return self._meta.get(name)

    def wait_idle(self) -> None:
        """Until nothing is under way, or the program has failed. For a reader beside a program that
        runs by itself: until it is over, because it may add more at any time."""
        self._wait(lambda: None if self._settled() else _NOTHING, "the program", None)

    def wait_end(self) -> None:
        self._wait(lambda: None if self._over() else _NOTHING, "the program", None)

    def _settled(self) -> bool:
        idle = self._pending == 0 and not self._others_write()
        return idle or self._over()

    def _others_write(self) -> bool:
        """The program runs by itself, and not in this thread."""
        return self._open_names and threading.get_ident() != self._writer

    def _over(self) -> bool:
        return self._ended or self._error is not None

    def _look(self, name: str) -> Any:
        if name in self._values:
            value = self._values[name]
            if isinstance(value, FailedValue):
                raise value.error
            return value
        if self._error is not None:
            raise self._error
        known = name in self._declared
        if (known and self._pending) or (self._others_write() and not self._ended):
            return _NOTHING
        names = ", ".join(sorted(self._declared)) or "none"
        raise KeyError(f"the program has no variable {written(name)}; it has: {names}")

    def _wait(self, look: Callable[[], _T], what: str, timeout: float | None) -> _T:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (found := look()) is _NOTHING:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{what} did not come within {timeout} s")
                self._changed.wait(left)
            return found

    # Streams: of the text, or of one variable.

    def deltas(self, name: str | None) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """(text, meta information) as it comes; without streaming once. Raises the program's error
        behind what came before it."""
        reader = _Reader(name)
        while (found := self._wait(lambda: self._next(reader), "the program", None)) is not None:
            yield found

    async def deltas_async(
        self, name: str | None
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """As `deltas`, on any event loop."""
        loop, changed, reader = asyncio.get_running_loop(), asyncio.Event(), _Reader(name)

        def watcher() -> None:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody reads there
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._watchers.add(watcher)
        try:
            while True:
                changed.clear()
                with self._changed:
                    found = self._next(reader)
                if found is _NOTHING:
                    await changed.wait()
                elif found is None:
                    return
                else:
                    yield found
        finally:
            with self._changed:
                self._watchers.discard(watcher)

    def _next(self, reader: _Reader) -> Any:
        """What is new to the reader, _NOTHING while it has to wait, None at the end."""
        found = self._new_text(reader) if reader.name is None else self._new_pieces(reader)
        if found is not None and (found[0] or found[1]):
            return found
        if self._error is not None and not reader.complete:
            raise self._error
        over = reader.complete or (reader.name is None and self._over())
        return None if over else _NOTHING

    def _new_text(self, reader: _Reader) -> tuple[str, dict[str, Any]] | None:
        over = self._settled()
        if not (self.streaming or over):
            return None
        fresh = self._text.since(reader.position)
        reader.position += len(fresh)
        reader.complete = over and self._error is None
        return fresh, {}

    def _new_pieces(self, reader: _Reader) -> tuple[str, dict[str, Any]] | None:
        name = reader.name
        assert name is not None
        pieces = self._pieces.get(name, [])
        whole = self._look(name) if not pieces else self._values.get(name, _NOTHING)
        if not pieces:
            if whole is _NOTHING or reader.complete:
                return None
            if not isinstance(whole, str):
                kind = type(whole).__name__
                raise ExpressionError(f"text_iter: {name} is a {kind}, no text; read s[{name!r}].")
            reader.complete = True
            return whole, self._meta.get(name) or {}
        fresh = pieces[reader.position :]
        reader.position += len(fresh)
        reader.unread += fresh
        reader.complete = whole is not _NOTHING
        if not (reader.complete or any(delta for delta, _ in fresh)):
            return None  # pieces without text come with the text behind them
        fresh, reader.unread = reader.unread, []
        return "".join(delta for delta, _ in fresh), _merged([meta for _, meta in fresh])


class FailedValue:
    """Stands for a variable of a branch that failed: reading it raises."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Reader:
    """Where one stream is. `unread`: pieces before it that were not given yet."""

    __slots__ = ("complete", "name", "position", "unread")

    def __init__(self, name: str | None) -> None:
        if name is not None and not isinstance(name, str):
            raise ExpressionError(f"text_iter takes the name of a variable, got {name!r}.")
        self.name, self.position, self.complete = name, 0, False
        self.unread: list[tuple[str, dict[str, Any]]] = []


def _merged(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """The last of them, with the log-probabilities of all."""
    if not metas:
        return {}
    merged = dict(metas[-1])
    for name in LOGPROBS:
        if any(name in meta for meta in metas):
            merged[name] = [entry for meta in metas for entry in meta.get(name) or []]
    return merged
