"""Compiles grammars in worker processes, with limits, and remembers what came of it.

A thread cannot be killed and a process can: one that takes too long is, and one that grows too
large fails by itself. Spare workers are kept ready, short texts do not wait for long ones
(turns.py), and when all are busy those that have had their share of time give way, and at once
those that nobody waits for any more, so that compilations that hang do not keep the next one
waiting. Knows nothing of requests, engines and masks.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable
from threading import Lock

from jserve.grammar.backend import GrammarError, GrammarUnavailable, Vocabulary
from jserve.grammar.endings import ended
from jserve.grammar.turns import NUM_EXTRA, Turns
from jserve.grammar.worker import work
from jserve.grammar.workers import Work, Worker, WorkerEnded, Workers
from jserve.metrics.meter import NO_METER, Meter
from jserve.types import CompiledSpec, GrammarSpec

_POLL_SECONDS = 0.05
_SEND_TRIES = 3
_FAILURE_BYTES = 200  # what a remembered failure counts for
_FORGET_SECONDS = 60.0  # when a timeout or a crash may be tried again


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """`max_workers` compile at a time (NUM_EXTRA more for short texts), each for `seconds`, or for
    `crowded_seconds` when others wait for a worker. The first of a kind loads its library before,
    for `seconds` too. `cache_bytes` of payloads are kept.
    """

    seconds: float = 30.0
    crowded_seconds: float = 5.0
    memory_mb: int = 2048
    max_workers: int = 16
    cache_bytes: int = 256 << 20


@dataclasses.dataclass(slots=True)
class CompilerCounts:
    """Since the start. `seconds` are those of the compilations that were not cached."""

    compiled: int = 0
    cache_hits: int = 0
    failed: int = 0
    timeouts: int = 0
    crashes: int = 0
    abandoned: int = 0  # before they ran, or for others
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    until: float  # time.monotonic()
    kind: type[GrammarError] = GrammarError


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """What comes of a spec, and how many wait for it."""

    future: concurrent.futures.Future[CompiledSpec]
    num_waiting: int = 0


class _TooLate(Exception):
    """`kind`: what to raise for it."""

    def __init__(self, reason: str, kind: type[GrammarError]) -> None:
        super().__init__(reason)
        self.kind = kind


class _Abandoned(Exception):
    """Nobody waits for it, and others do for its worker."""


class GrammarCompiler:
    """`compile` from any thread; one result for all who ask for the same text at the same time."""

    def __init__(
        self,
        backend: str,
        vocabulary: Vocabulary,
        limits: CompilerLimits | None = None,
        work: Work = work,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter = NO_METER,
    ) -> None:
        self.counts = CompilerCounts()
        self._limits = limits = limits or CompilerLimits()
        self._clock, self._meter = clock, meter
        most = limits.max_workers + NUM_EXTRA
        self._workers = Workers(work, (backend, vocabulary, limits.memory_mb), most)
        self._threads = concurrent.futures.ThreadPoolExecutor(most, "jserve-grammar")
        self._turns: Turns[GrammarSpec] = Turns(limits.max_workers)
        self._lock = Lock()
        self._open: dict[GrammarSpec, _Open] = {}
        self._cache: collections.OrderedDict[GrammarSpec, CompiledSpec | _Failure] = (
            collections.OrderedDict()
        )
        self._cached_bytes = 0

    def known(self, spec: GrammarSpec) -> concurrent.futures.Future[CompiledSpec] | None:
        """What came of it before, as a future that is done; None when it must be compiled."""
        with self._lock:
            return self._known(spec)

    def compile(self, spec: GrammarSpec) -> concurrent.futures.Future[CompiledSpec]:
        """A future that must not be cancelled: others may wait for it. Who does no more says so by
        `leave`. Raises GrammarError."""
        with self._lock:
            known = self._known(spec)
            if known is not None:
                return known
            found = self._open.get(spec)
            if found is None:
                found = self._open[spec] = _Open(concurrent.futures.Future())
                self._turns.put(spec, len(spec.text))
                self._threads.submit(self._run)
            found.num_waiting += 1
            return found.future

    def leave(self, spec: GrammarSpec, future: concurrent.futures.Future[CompiledSpec]) -> None:
        """One less waits for what `compile` has returned. When that was the last, it is not begun;
        when it runs, it goes on for the next one until others wait for its worker."""
        with self._lock:
            found = self._open.get(spec)
            if found is None or found.future is not future:
                return
            found.num_waiting -= 1
            if found.num_waiting == 0 and self._turns.take_back(spec):
                self._abandon(spec)

    def flush(self) -> None:
        """Forget all results."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def close(self) -> None:
        """End the workers; compilations that run fail."""
        self._workers.close()
        self._threads.shutdown(wait=True)

    def _known(self, spec: GrammarSpec) -> concurrent.futures.Future[CompiledSpec] | None:
        found = self._cache.get(spec)
        if isinstance(found, _Failure) and found.until < self._clock():
            self._forget(spec)
            found = None
        if found is None:
            return None
        self._cache.move_to_end(spec)
        self.counts.cache_hits += 1
        self._meter.count("num_grammar_cache_hit_total", 1)
        done: concurrent.futures.Future[CompiledSpec] = concurrent.futures.Future()
        if isinstance(found, _Failure):
            done.set_exception(found.kind(found.reason))
        else:
            done.set_result(found)
        return done

    def _run(self) -> None:
        """Compile what is due."""
        taken = self._turns.take()
        if taken is None:
            return
        spec, turn = taken
        future = self._open[spec].future
        try:
            result = self._result(spec)
        except _Abandoned:
            return
        except BaseException as error:  # our fault, and who waits must hear of it
            with self._lock:
                del self._open[spec]
            future.set_exception(error)
            raise
        finally:
            self._turns.give(turn)
        if isinstance(result, _Failure):
            future.set_exception(result.kind(result.reason))
        else:
            future.set_result(result)

    def _result(self, spec: GrammarSpec) -> CompiledSpec | _Failure:
        start = time.monotonic()
        result: CompiledSpec | _Failure
        try:
            result = self._compiled(spec)
        except GrammarUnavailable as error:
            result = _Failure(str(error), self._clock() - 1.0, GrammarUnavailable)
        except GrammarError as error:
            result = _Failure(str(error), float("inf"))
        except _TooLate as error:
            with self._lock:
                alone = len(self._open) == 1
            # beside others it may have been short of processor time: it may be tried again at once
            until = self._clock() + (_FORGET_SECONDS if alone else -1.0)
            result = _Failure(str(error), until, error.kind)
            self._meter.count("num_grammar_timeout_total", 1)
            with self._lock:
                self.counts.timeouts += 1
        except WorkerEnded as error:
            reason = ended(error.status, self._limits.memory_mb)
            result = _Failure(reason, self._clock() + _FORGET_SECONDS)
            with self._lock:
                self.counts.crashes += 1
        seconds = time.monotonic() - start
        self._meter.timing.observe("grammar_compilation_time_seconds", seconds)
        with self._lock:
            self.counts.seconds += seconds
            self._remember(spec, result)
            del self._open[spec]
        return result

    def _compiled(self, spec: GrammarSpec) -> CompiledSpec:
        if "\0" in spec.text:
            raise GrammarError(f"it has a NUL byte at position {spec.text.index(chr(0))}")
        worker = self._sent(spec)
        again = False
        try:
            payload, reason, again = self._answer(worker, spec)
        finally:
            self._workers.give(worker, again)
        if reason:
            raise GrammarError(reason)
        return CompiledSpec(spec=spec, payload=payload)

    def _sent(self, spec: GrammarSpec) -> Worker:
        """A worker that has the spec, and what it needs. One that died idle says nothing about it.
        Raises _TooLate."""
        seconds = self._limits.seconds
        for _ in range(_SEND_TRIES):
            worker, loaded = self._workers.take(spec.kind), None
            with contextlib.suppress(EOFError, OSError):
                worker.send(spec)
                loaded = worker.wait_ready(seconds)
            if loaded:
                return worker
            self._workers.give(worker, again=False)
            if loaded is False:
                why = f"what compiles it was not loaded within {seconds:g} seconds"
                raise _TooLate(f"{why}; try again later", GrammarUnavailable)
        raise GrammarUnavailable("no worker process stays alive")

    def _answer(self, worker: Worker, spec: GrammarSpec) -> tuple[bytes, str, bool]:
        start = time.monotonic()
        while not worker.answered(_POLL_SECONDS):
            spent = time.monotonic() - start
            limit, hint, kind = self._limits.seconds, "make it smaller", GrammarError
            crowded = self._turns.crowded
            if crowded and self._abandoned(spec):
                raise _Abandoned
            if crowded and self._limits.crowded_seconds < limit:
                limit, hint = self._limits.crowded_seconds, "others wait: try again later"
                kind = GrammarUnavailable
            if spent >= limit:
                why = f"it was not compiled within {limit:g} seconds of a worker's time; {hint}"
                raise _TooLate(why, kind)
        return worker.receive()

    def _abandoned(self, spec: GrammarSpec) -> bool:
        """Whether nobody waits for it, nor will: who asks from now on begins anew."""
        with self._lock:
            if self._open[spec].num_waiting:
                return False
            self._abandon(spec)
            return True

    def _abandon(self, spec: GrammarSpec) -> None:
        self._open.pop(spec).future.cancel()
        self.counts.abandoned += 1

    def _remember(self, spec: GrammarSpec, result: CompiledSpec | _Failure) -> None:
        failed = isinstance(result, _Failure)
        self.counts.failed += failed
        self.counts.compiled += not failed
        self._cache[spec] = result
        self._cached_bytes += _size(spec, result)
        while self._cached_bytes > self._limits.cache_bytes and len(self._cache) > 1:
            self._forget(next(iter(self._cache)))

    def _forget(self, spec: GrammarSpec) -> None:
        self._cached_bytes -= _size(spec, self._cache.pop(spec))


def _size(spec: GrammarSpec, result: CompiledSpec | _Failure) -> int:
    size = _FAILURE_BYTES if isinstance(result, _Failure) else len(result.payload)
    return len(spec.text) + size
