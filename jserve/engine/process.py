"""The process, or thread, that an engine lives in: both ends of its life.

Above, what the API process holds; below, what runs on the other side. Each ends when the other
does, and says so. Knows nothing of devices: the builder of a Loop is named by text, and imported
where the Loop runs.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from jserve.config import Config, num_replicas
from jserve.engine.addresses import Addresses
from jserve.engine.channel import ApiEnd, EngineEnd
from jserve.engine.local import local_ends
from jserve.engine.step_log import line_form
from jserve.errors import ConfigError, JserveError
from jserve.processes import start_process
from jserve.types import Progress

if TYPE_CHECKING:
    from jserve.engine.loop import Loop

logger = logging.getLogger("jserve.engine")

_PATIENCE = 5.0  # seconds for a killed process to end


class EngineProcess:
    """The engine in a process of its own: spawned, never forked, for it starts a JAX backend."""

    def __init__(self, config: Config, builder: str) -> None:
        if builder.startswith("__main__:"):
            raise ConfigError("builder must name a module that can be imported, not __main__")
        addresses = Addresses.create()
        self.channel: ApiEnd = addresses.api_end()
        try:
            self._process = start_process(
                engine_main, (config, addresses, builder), "jserve-engine"
            )
        except ConfigError:
            self.channel.close()
            raise
        self.alive = self._process.is_alive
        self.sentinel: int | None = self._process.sentinel

    def cause(self) -> str:
        return f"the engine process ended with exit code {self._process.exitcode}"

    def stop(self, patience: float) -> None:
        """Wait `patience` seconds for it to end by itself, then end it; it ignores what asks."""
        try:
            self._process.join(patience)
        finally:  # also when interrupted: multiprocessing waits for its children at exit
            self._process.kill()
            self._process.join(_PATIENCE)


class EngineThread:
    """The engine in a thread: it can be asked to end, not made to."""

    def __init__(self, config: Config, builder: str) -> None:
        self.channel, engine_end = local_ends()
        left = threading.Event()
        self.sentinel: int | None = None
        self._thread = threading.Thread(
            target=run_engine,
            args=(config, engine_end, builder),
            kwargs={"left": left.is_set},
            name="jserve-engine",
            daemon=True,
        )
        self._thread.start()
        self._left, self.alive = left, self._thread.is_alive

    def cause(self) -> str:
        return "the engine thread ended"

    def stop(self, patience: float) -> None:
        self._thread.join(patience)
        self._left.set()


def run_engine(
    config: Config,
    channel: EngineEnd,
    builder: str,
    end: Callable[[], None] | None = None,
    left: Callable[[], bool] = lambda: False,
) -> bool:
    """Build a Loop and run it until it is told to stop. What fails is told over `channel`.

    Returns whether all went well. `end` is called when a step hangs, once that is told. `left`:
    whether nobody listens any more, so that what fails from then on is no news: the program may be
    ending under it.
    """

    def fail(message: str, error: str) -> None:
        channel.send(Progress(stage="failed", message=message, payload={"error": error}))

    def on_hang() -> None:
        fail("a step of the engine hangs", "TimeoutError")
        if end is not None:
            end()

    try:
        module, _, function = builder.partition(":")
        loop: Loop = getattr(importlib.import_module(module), function)(config, channel)
        channel.send(Progress(stage="ready", payload=loop.facts))
        loop.run(on_hang)
        return True
    except JserveError as error:
        fail(str(error), type(error).__name__)
    except Exception as error:  # the process's top: the other side must hear of it
        if not left():
            logger.critical("the engine failed", exc_info=error)
        fail(f"{type(error).__name__}: {error}", type(error).__name__)
    return False


def engine_main(config: Config, addresses: Addresses, builder: str) -> None:
    """The main function of an engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to the whole group
        signal.signal(number, signal.SIG_IGN)  # the API process ends this one, once it is done
    rank = config.replica.rank if num_replicas(config.execution) > 1 else None
    lines = logging.StreamHandler()
    lines.setFormatter(line_form(rank))
    logging.basicConfig(level=config.server.log_level.upper(), handlers=[lines])
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    channel = addresses.engine_end()

    def end(code: int) -> NoReturn:
        # without unwinding, which would wait for compilations in the background
        channel.close()
        os._exit(code)

    end(0 if run_engine(config, channel, builder, lambda: end(1)) else 1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "an engine process is started by multiprocessing"
    multiprocessing.connection.wait([parent.sentinel])
    print("jserve: the API process ended, so the engine process ends", file=sys.stderr, flush=True)
    os._exit(1)
