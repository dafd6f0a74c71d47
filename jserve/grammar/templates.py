"""Compiled grammars as the engine's process has them: loaded once, forked for each answer.

Loading takes milliseconds, and the first of a kind may need a library that takes seconds; so each
kind has a thread of its own. What was used latest is kept, and what somebody still has the spec of.
Knows nothing of requests.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Callable

from jserve.grammar.backend import Backend, Template
from jserve.types import CompiledSpec

_KEPT_BYTES = 64 << 20  # of payloads
Loading = concurrent.futures.Future[Template]


class Templates:
    """Args:
    make_backend: called once, in a thread, from the start.
    seconds: for which a request may wait for one to be loaded.
    """

    def __init__(self, make_backend: Callable[[], Backend], seconds: float = 30.0) -> None:
        self.seconds = seconds
        self._first = _thread()
        self._threads: dict[str, concurrent.futures.ThreadPoolExecutor] = {}  # by kind
        self._backend = self._first.submit(make_backend)
        self._lock = threading.Lock()
        # by spec, while that object lives: the object itself, and what was loaded for it
        self._held: weakref.WeakKeyDictionary[
            CompiledSpec, tuple[weakref.ref[CompiledSpec], Loading]
        ] = weakref.WeakKeyDictionary()
        self._latest: collections.OrderedDict[CompiledSpec, None] = collections.OrderedDict()
        self._num_bytes = 0  # of the latest

    def load(self, compiled: CompiledSpec) -> Loading:
        """The template, or what it will be; the same one for all who ask."""
        return self.share(compiled)[1]

    def share(self, compiled: CompiledSpec) -> tuple[CompiledSpec, Loading]:
        """As `load`, with the object to have instead of `compiled`: as long as somebody has it, it
        is loaded once. A load that failed is tried again."""
        with self._lock:
            known = self._held.get(compiled)
            shared = (known and known[0]()) or compiled
            if known is None or _failed(known[1]):
                loading = self._thread_of(compiled.spec.kind).submit(self._load, compiled.payload)
                self._held[shared] = weakref.ref(shared), loading
            else:
                loading = known[1]
            self._keep(shared)
            return shared, loading

    def close(self) -> None:
        with self._lock:
            for thread in (self._first, *self._threads.values()):
                thread.shutdown(wait=False, cancel_futures=True)

    def _keep(self, compiled: CompiledSpec) -> None:
        """It is the latest; the oldest ones are left to those who have them."""
        if compiled not in self._latest:
            self._latest[compiled] = None
            self._num_bytes += len(compiled.payload)
        self._latest.move_to_end(compiled)
        while self._num_bytes > _KEPT_BYTES and len(self._latest) > 1:
            oldest, _ = self._latest.popitem(last=False)
            self._num_bytes -= len(oldest.payload)

    def _thread_of(self, kind: str) -> concurrent.futures.ThreadPoolExecutor:
        return self._threads.get(kind) or self._threads.setdefault(kind, _thread())

    def _load(self, payload: bytes) -> Template:
        return self._backend.result().load(payload)


def _failed(loading: Loading) -> bool:
    return loading.done() and (loading.cancelled() or loading.exception() is not None)


def _thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, "jserve-grammar-load")
