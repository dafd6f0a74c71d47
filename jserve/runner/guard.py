"""Notices compilations while serving, which is a bug: after start-up only compiled programs run."""

from __future__ import annotations

import logging
import threading

import jax

logger = logging.getLogger("jserve.runner")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class RecompileError(RuntimeError):
    """A program was compiled while serving, under --recompile-guard=error."""


class CompileGuard:
    """Counts compilations inside its own context: in the thread and at the time of a step.

    `mode`: off | warn | error. Compilations elsewhere are none of its business. Call `close` when
    done: listeners are global to the process.
    """

    def __init__(self, mode: str) -> None:
        self.recompiles = 0
        self._mode = mode
        self._armed = self._pending = False
        self._watched: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def arm(self) -> None:
        """From now on a compilation is a bug."""
        self._armed = True

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> None:
        self._watched = threading.get_ident()

    def __exit__(self, failure: object, *_: object) -> None:
        """Raises RecompileError if something was compiled inside, in mode error."""
        self._watched = None
        pending, self._pending = self._pending, False
        if pending and self._mode == "error" and failure is None:
            raise RecompileError(f"{self.recompiles} compilations while serving")

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT and self._armed and threading.get_ident() == self._watched:
            self.recompiles += 1
            self._pending = True
            if self._mode != "off":
                warning = "compiled a program while serving (%.2f s)"
                logger.warning(warning, duration_secs, stack_info=True)
