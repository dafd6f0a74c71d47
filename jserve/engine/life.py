"""An engine's life as the API process follows it: its start, its shutdown, and why it ended."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from typing import Any

from tqdm import tqdm

from jserve.config import Config
from jserve.engine.ranks import answer_timeout, start_worker
from jserve.errors import ConfigError, EngineDeadError, WeightError
from jserve.types import Control, Progress

_START_ERRORS = {error.__name__: error for error in (ConfigError, WeightError)}
FORKED = "the engine is that of the process that this one was forked from; start another one here"
_PATIENCE = 5.0  # seconds that a serving engine gets to end by itself


class EngineLife:
    """Attributes: `worker`, the process or thread, or several as one; `failure`, what the engine
    said before it ends; `ended`, why there is no engine any more. Both are "" while it lives.
    `patience`: seconds for it to answer a question, None where that is sure to be answered. A
    forked process can neither use nor end it: for that one it has ended."""

    def __init__(self, config: Config, builder: str, inline: bool) -> None:
        self.worker = start_worker(config, builder, inline)
        self.patience = answer_timeout(config)
        self.failure = ""
        self.ended = ""
        self.forked = False  # whether this is a forked process
        os.register_at_fork(after_in_child=functools.partial(_disown, weakref.ref(self)))
        self._progress: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self._ready = False
        self._closing = threading.Lock()

    def on_progress(self, message: Progress) -> None:
        if message.stage == "failed":
            self.failure = message.message
        self._progress.put(message)

    def await_ready(self, show: bool) -> dict[str, Any]:
        """Block until the engine serves; its facts. `show`: progress bars on stderr.

        Raises ConfigError or WeightError when it cannot start, EngineDeadError when it died.
        """
        stage, bar = "", tqdm(disable=True)
        try:
            while True:
                message = self._progress.get()
                if message.stage == "failed":
                    error = _START_ERRORS.get(message.payload.get("error", ""), EngineDeadError)
                    raise error(message.message)
                if message.stage == "ready":
                    self._ready = True
                    return message.payload
                if message.stage != stage:
                    bar.close()
                    stage = message.stage
                    bar = tqdm(desc=stage, total=message.total, disable=not show)
                bar.update(message.done - bar.n)
        finally:
            bar.close()

    def bury(self) -> None:
        """The worker has ended, or said that it will: nobody waits for a start any more."""
        self.ended = self.failure or self.ended or self.worker.cause()
        self._progress.put(Progress(stage="failed", message=self.ended))

    def shutdown(self, reader: threading.Thread) -> None:
        """End the worker, then its `reader`. Later calls do nothing."""
        if self.forked or not self._closing.acquire(blocking=False):
            return
        dead, self.ended = bool(self.ended), self.ended or "the engine was shut down"
        if not dead:
            self.worker.channel.send(Control(id="shutdown", op="shutdown"))
        self.worker.stop(_PATIENCE if self._ready and not dead else 0.0)
        if not self.worker.alive():
            reader.join(_PATIENCE)
        if not reader.is_alive():
            self.worker.channel.close()


def _disown(life: weakref.ref[EngineLife]) -> None:
    """In a forked process; what is registered for one stays, so it holds nothing."""
    if (one := life()) is not None:
        one.forked, one.ended = True, FORKED
