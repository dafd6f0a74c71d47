"""Every program compiled ahead of time: what a program is, and the threads that compile them.

The runner calls Compiled objects only: they raise on a wrong shape, dtype or sharding instead of
compiling. Knows nothing of what the programs do, and not which of them a step prefers.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from jserve.runner.buckets import Key
from jserve.runner.guard import CompileGuard
from jserve.runner.jax_settings import pinned
from jserve.runner.store import ProgramStore

logger = logging.getLogger("jserve.runner")

Options = dict[str, Any]  # of XLA, for one program


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A pure function and what it is compiled for: ShapeDtypeStructs with shardings."""

    key: Key
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    out_shardings: Any

    def lower(self) -> jax.stages.Lowered:
        jitted = jax.jit(
            self.function, donate_argnums=self.donated, out_shardings=self.out_shardings
        )
        with pinned():
            return jitted.lower(*self.arguments)


class Manifest:
    """Lowers programs in the caller's thread (tracing holds the GIL), compiles them in others; what
    the store holds is loaded instead.

    `ready` holds what is compiled so far; the threads add to it. Without the `required` ones
    nothing is served; they come first.
    """

    def __init__(
        self,
        required: Sequence[Program],
        others: Sequence[Program],
        guard: CompileGuard,
        options: Callable[[Key], Options | None] = lambda _: None,
        store: ProgramStore | None = None,
    ) -> None:
        self.ready: dict[Key, jax.stages.Compiled] = {}
        self.total = len(required) + len(others)
        self._required, self._others = required, others
        self._guard = guard
        self._options = options
        self._store = store or ProgramStore(None)
        self._futures: list[Future[None]] = []
        workers = min(8, max(1, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(workers, "compile", initializer=_yield_to_serving)

    def compile(self, progress: Callable[[int, int], None], *, everything: bool) -> None:
        """Return when all is lowered, and compiled what is required, or `everything`.

        The rest goes on in the background. `progress` is called in this thread with (done, total).
        """
        for program in (*self._required, *self._others):
            if self._store.holds(program.key):
                future = self._pool.submit(self._load, program)
            else:
                future = self._pool.submit(self._compile, program.key, program.lower())
            self._futures.append(future)
            progress(len(self.ready), self.total)
        self._pool.shutdown(wait=False)
        awaited = set(self._futures if everything else self._futures[: len(self._required)])
        while awaited:
            done, awaited = wait(awaited, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            progress(len(self.ready), self.total)
        self._guard.arm()

    def wait_all(self) -> None:
        """Block until every program is compiled; raises what a compilation raised. For
        measurements and tests: an engine serves meanwhile."""
        for future in self._futures:
            future.result()

    def cancel(self) -> None:
        """Forget what has not begun to compile."""
        for future in self._futures:
            future.cancel()

    def _load(self, program: Program) -> None:
        compiled = self._store.load(program.key)
        if compiled is None:
            self._compile(program.key, program.lower())
        else:
            self.ready[program.key] = compiled

    def _compile(self, key: Key, lowered: jax.stages.Lowered) -> None:
        try:
            compiled = lowered.compile(compiler_options=self._options(key))
            self._store.save(key, compiled)
            self.ready[key] = compiled
        except Exception:  # raised again: the log names the program
            logger.warning("%s does not compile", key)  # others serve, if it was not required
            raise


def _yield_to_serving() -> None:
    """Background compilation must not slow steps down; on Linux a thread can be nice alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
