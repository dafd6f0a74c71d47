"""Worker processes: started ahead, handed out one by one, and ended.

What they do is a function that talks through a pipe; nothing here knows what is compiled.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.types import GrammarSpec

#: Called in the process with its end of the pipe and the arguments; sends True when it is ready.
Work = Callable[..., None]

_START_SECONDS = 120.0  # for a worker to import its backend
_NUM_SPARE = 1  # idle workers that are kept, and started ahead


class Worker:
    """One process and the pipe to it."""

    def __init__(self, work: Work, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=work, args=(other, *arguments), name="jserve-grammar", daemon=True
        )
        self._process.start()
        other.close()
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, spec: GrammarSpec) -> None:
        """Raises EOFError or OSError, as all below, when the process has ended."""
        if not self._ready:
            self._ready = self._begun()
        self._pipe.send((spec.kind, spec.text))
        self._begun()

    def _begun(self) -> bool:
        """Wait for the process to import what it needs."""
        if not self._pipe.poll(_START_SECONDS):
            raise OSError("a worker did not start")
        return bool(self._pipe.recv())

    def answered(self, seconds: float) -> bool:
        return self._pipe.poll(seconds)

    def receive(self) -> tuple[bytes, str, bool]:
        return self._pipe.recv()

    def kill(self) -> None:
        """Whoever waits for its answer gets EOFError or OSError, and ends it."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join(5.0)
        self._pipe.close()


class Workers:
    """At most `most` at a time, whoever takes them sees to that; an idle one waits for the next."""

    def __init__(self, work: Work, arguments: tuple[Any, ...], most: int) -> None:
        self._work, self._arguments, self._most = work, arguments, most
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._closed = False
        self._refill: threading.Thread | None = None
        self._start_spare()

    def take(self) -> Worker:
        """An idle worker, or a new one; the next spare is started beside. Raises GrammarError."""
        with self._lock:
            if self._closed:
                raise GrammarError("the engine is shutting down")
            worker = self._idle.pop() if self._idle else None
        if worker is not None and not worker.alive:
            worker.end()
            worker = None
        worker = worker or Worker(self._work, self._arguments)
        with self._lock:
            self._busy.add(worker)
            if self._closed:
                worker.kill()
        self._start_spare()
        return worker

    def give(self, worker: Worker, again: bool) -> None:
        """Back to the idle ones, unless there are enough or it has had its day."""
        with self._lock:
            self._busy.discard(worker)
            keep = again and not self._closed and len(self._idle) < _NUM_SPARE + 1
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.end()

    def close(self) -> None:
        """End the idle ones and kill those that are taken, which must still be given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            refill = self._refill
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.end()
        if refill is not None:
            refill.join()

    def _start_spare(self) -> None:
        with self._lock:
            enough = len(self._idle) >= _NUM_SPARE or len(self._busy) >= self._most
            if enough or self._closed or self._refill is not None:
                return
            self._refill = threading.Thread(target=self._add_spare, name="jserve-grammar-spare")
            self._refill.start()

    def _add_spare(self) -> None:
        worker = Worker(self._work, self._arguments)
        with self._lock:
            self._refill = None
            keep = not self._closed
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.end()
