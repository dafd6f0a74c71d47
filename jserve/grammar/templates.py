"""Compiled grammars as the engine's process has them: loaded once, forked for each answer.

Loading takes milliseconds, and the first of a kind may need a library that takes seconds; so each
kind has a thread of its own. What was used latest is kept. Knows nothing of requests.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
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
        self._loaded: collections.OrderedDict[CompiledSpec, Loading] = collections.OrderedDict()
        self._num_bytes = 0

    def load(self, compiled: CompiledSpec) -> Loading:
        """The template, or what it will be; the same one for all who ask."""
        with self._lock:
            known = self._loaded.get(compiled)
            if known is not None:
                self._loaded.move_to_end(compiled)
                return known
            kind = compiled.spec.kind
            thread = self._threads.get(kind) or self._threads.setdefault(kind, _thread())
            loading = thread.submit(self._load, compiled.payload)
            self._loaded[compiled] = loading
            self._num_bytes += len(compiled.payload)
            while self._num_bytes > _KEPT_BYTES and len(self._loaded) > 1:
                oldest, _ = self._loaded.popitem(last=False)
                self._num_bytes -= len(oldest.payload)
            return loading

    def close(self) -> None:
        with self._lock:
            for thread in (self._first, *self._threads.values()):
                thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, payload: bytes) -> Template:
        return self._backend.result().load(payload)


def _thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, "jserve-grammar-load")
