"""A process that compiles grammars one at a time, until its pipe closes.

It is bounded from outside: whoever waits for it kills it when time is up, and its memory has a
limit from the start, beyond which an allocation fails here and nowhere else.
"""

from __future__ import annotations

import os
import resource
import signal
from multiprocessing.connection import Connection

import psutil

from jserve.grammar.backend import Backend, GrammarError, Vocabulary
from jserve.grammar.choice import make_backend
from jserve.types import GrammarSpec

#: payload, why there is none, and whether this process will take another spec
Answer = tuple[bytes, str, bool]

_MAX_PAYLOAD = 64 << 20  # it travels to the engine, and is kept there
_STACK_OF_THREADS = 2 << 20  # where there is no limit
_KEPT_SHARE = 4  # of its memory: what a worker may keep of one compilation and go on


def work(pipe: Connection, backend_name: str, vocabulary: Vocabulary, memory_mb: int) -> None:
    """Answer (kind, text) pairs; True is sent when the backend is there, and before each answer,
    when it has what that kind needs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)  # decoding comes first
    _limit_stack()
    serve(pipe, make_backend(backend_name, vocabulary), memory_mb)


def serve(pipe: Connection, backend: Backend, memory_mb: int) -> None:
    limited = memory_mb << 20
    process = psutil.Process()
    prepared: set[str] = set()
    pipe.send(True)
    start = process.memory_info()
    again = True
    while again:
        try:
            kind, text = pipe.recv()
        except (EOFError, OSError):
            return
        if kind not in prepared:
            prepared.add(kind)
            _limit_memory(resource.RLIM_INFINITY)
            backend.prepare(kind)
            start = process.memory_info()
            _limit_memory(start.vms + limited)
        pipe.send(True)
        payload, reason, again = _compile(backend, GrammarSpec(kind=kind, text=text), memory_mb)
        grown = process.memory_info().rss - start.rss
        again = again and grown < limited // _KEPT_SHARE
        pipe.send((payload, reason, again))


def _limit_stack() -> None:
    """To half of what the threads have that load what is compiled here, and use as much again."""
    given, most = resource.getrlimit(resource.RLIMIT_STACK)
    threads = _STACK_OF_THREADS if given == resource.RLIM_INFINITY else given
    resource.setrlimit(resource.RLIMIT_STACK, (threads // 2, most))


def _limit_memory(num_bytes: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, most))


def _compile(backend: Backend, spec: GrammarSpec, memory_mb: int) -> Answer:
    try:
        payload = backend.compile(spec)
        if len(payload) <= _MAX_PAYLOAD:
            return payload, "", True
        most = f"at most {_MAX_PAYLOAD >> 20} are possible; make it smaller"
        return b"", f"its compiled form has {len(payload) >> 20} MB, and {most}", True
    except GrammarError as error:
        return b"", str(error), True
    except MemoryError:
        return b"", f"it needs more than {memory_mb} MB; make it smaller", False
    except BaseException as error:  # a panic in Rust is no Exception, and leaves the library unsure
        return b"", f"the compiler failed: {type(error).__name__}: {error}"[:500], False
