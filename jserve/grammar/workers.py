"""Worker processes: started ahead, handed out one by one, and ended.

What they do is a function that talks through a pipe; nothing here knows what is compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jserve.grammar.backend import GrammarUnavailable
from jserve.processes import start_process
from jserve.types import GrammarSpec

#: Called in the process with its end of the pipe and the arguments; sends True when it is ready.
Work = Callable[..., None]

_START_SECONDS = 120.0  # for a worker to import its backend
_END_SECONDS = 5.0
_START_TRIES = 3
_NUM_SPARE = 1  # idle workers that are kept, and started ahead
_MOST_STARTING = max(2, (os.cpu_count() or 1) // 2)


class WorkerEnded(EOFError):
    """By itself, while it worked. `status`: what it returned, or the signal that ended it as a
    negative number; None when that is not known."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"{status=}")
        self.status = status


class Worker:
    """One process and the pipe to it. `kinds`: those of specs whose library it has loaded."""

    def __init__(self, work: Work, arguments: tuple[Any, ...]) -> None:
        self.kinds: set[str] = set()
        self._pipe: Connection
        self._pipe, other = multiprocessing.Pipe()
        self._process = start_process(work, (other, *arguments), "jserve-grammar")
        other.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def wait_ready(self, seconds: float = _START_SECONDS) -> bool:
        """Until the process has imported what it needs, or this time is over. Raises EOFError or
        OSError, as all below, when it has ended."""
        if not self._pipe.poll(seconds):
            return False
        self._pipe.recv()
        return True

    def send(self, spec: GrammarSpec) -> None:
        """It then says again when it is ready: the first of a kind may need one more library."""
        self.kinds.add(spec.kind)
        self._pipe.send((spec.kind, spec.text))

    def answered(self, seconds: float) -> bool:
        return self._pipe.poll(seconds)

    def receive(self) -> tuple[bytes, str, bool]:
        """Raises WorkerEnded."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            raise WorkerEnded(self._process.exitcode) from None

    def kill(self) -> None:
        """Whoever waits for its answer gets EOFError or OSError, and ends it."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._pipe.close()


class Workers:
    """At most `most` at a time, whoever takes them sees to that.

    A compilation mostly takes milliseconds, and a new process takes a second of a core: who finds
    none idle gets the next one that is given back or has started, and few start at a time.
    """

    def __init__(self, work: Work, arguments: tuple[Any, ...], most: int) -> None:
        self._work, self._arguments, self._most = work, arguments, most
        self._changed = threading.Condition()  # guards all below
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._starting: dict[threading.Thread, Worker | None] = {}
        self._num_waiting = 0
        self._num_failed = 0  # starts
        self._closed = False
        with self._changed:
            self._start_some()

    def take(self, kind: str) -> Worker:
        """One that is ready, if possible for this kind of spec; the next spare is started beside.
        Raises GrammarUnavailable."""
        with self._changed:
            self._num_waiting += 1
            try:
                worker = self._next(kind)
            finally:
                self._num_waiting -= 1
            self._busy.add(worker)
            self._start_some()
            return worker

    def give(self, worker: Worker, again: bool) -> None:
        """Back to the idle ones, unless there are enough or it has had its day."""
        with self._changed:
            self._busy.discard(worker)
            keep = again and self._keep(worker)
        if not keep:
            worker.end()

    def close(self) -> None:
        """End the idle ones and kill those that are taken, which must still be given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            starting = dict(self._starting)
            for worker in (*self._busy, *starting.values()):
                if worker is not None:
                    worker.kill()
            self._changed.notify_all()
        for worker in idle:
            worker.end()
        for thread in starting:
            thread.join()

    def _next(self, kind: str) -> Worker:
        most_failed = self._num_failed + _START_TRIES
        while not self._closed:
            while self._idle:
                fit = [i for i, worker in enumerate(self._idle) if kind in worker.kinds]
                worker = self._idle.pop(fit[-1] if fit else -1)
                if worker.alive:
                    return worker
                worker.end()
            if self._num_failed >= most_failed:
                raise GrammarUnavailable("no worker process stays alive")
            self._start_some()
            self._changed.wait()
        raise GrammarUnavailable("the engine is shutting down")

    def _keep(self, worker: Worker) -> bool:
        if self._closed or len(self._idle) > _NUM_SPARE + self._num_waiting:
            return False
        self._idle.append(worker)
        self._changed.notify()
        return True

    def _start_some(self) -> None:
        crowded = len(self._busy) + self._num_waiting >= self._most
        wanted = self._num_waiting + (0 if crowded else _NUM_SPARE) - len(self._idle)
        while len(self._starting) < min(wanted, _MOST_STARTING) and not self._closed:
            thread = threading.Thread(target=self._start, name="jserve-grammar-start")
            self._starting[thread] = None
            thread.start()

    def _start(self) -> None:
        worker: Worker | None = None
        ready = False
        try:
            worker = Worker(self._work, self._arguments)
            with self._changed:
                self._starting[threading.current_thread()] = worker
                if self._closed:
                    worker.kill()
            ready = worker.wait_ready()
        except (EOFError, OSError):
            pass  # whoever waits for it tries again
        with self._changed:
            del self._starting[threading.current_thread()]
            self._num_failed += not ready
            keep = ready and worker is not None and self._keep(worker)
            self._changed.notify_all()
        if worker is not None and not keep:
            worker.end()
