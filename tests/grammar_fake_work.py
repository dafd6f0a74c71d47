"""Workers of a grammar compiler that do as the text says: `sleep`, `die`, `panic`, `bad`, …

For ebnf they load something for a second before, for structural_tag for ever.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from jserve.grammar.backend import GrammarError, Template, Vocabulary
from jserve.grammar.worker import serve
from jserve.types import GrammarSpec

VOCABULARY = Vocabulary((b"a", b"b", b""), 3, (2,))


class Panic(BaseException):
    """Like pyo3's PanicException."""


class ScriptedBackend:
    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def prepare(self, kind: str) -> None:
        time.sleep({"ebnf": 1.0, "structural_tag": 600.0}.get(kind, 0.0))

    def compile(self, spec: GrammarSpec) -> bytes:
        command, _, rest = spec.text.partition(" ")
        if command == "sleep":
            time.sleep(float(rest.split()[0]))
        elif command == "die":
            os._exit(3)
        elif command == "signal":
            os.kill(os.getpid(), int(rest))
        elif command == "panic":
            raise Panic("index out of bounds")
        elif command == "bad":
            raise GrammarError(f"{rest} at position 3")
        elif command == "keep":
            self._kept.append(bytearray(int(rest) << 20))
        elif command == "bytes":
            return b"x" * int(rest)
        return f"{os.getpid()}".encode()

    def load(self, payload: bytes) -> Template:
        raise NotImplementedError


def scripted_work(
    pipe: Connection, backend_name: str, vocabulary: Vocabulary, memory_mb: int
) -> None:
    assert vocabulary == VOCABULARY and backend_name == "scripted"
    serve(pipe, ScriptedBackend(), memory_mb)
