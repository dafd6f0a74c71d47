"""Which backend compiles and masks: by name, and by what a spec is written in."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable

from jserve.errors import ConfigError
from jserve.grammar.backend import Backend, Template, Vocabulary
from jserve.types import GrammarSpec

#: What --grammar-backend may name, the default first where it is installed.
BACKENDS = ("xgrammar", "llguidance")


def choose_backend(name: str | None) -> str:
    """The backend to use: the one named, else the first that is installed. Raises ConfigError."""
    if name == "none":
        return name
    if name == "xgrammar" and not importlib.util.find_spec("xgrammar"):
        raise ConfigError("--grammar-backend xgrammar needs: pip install 'jserve[grammar]'")
    return name or next(name for name in BACKENDS if importlib.util.find_spec(name))


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """A backend by name; imports its package."""
    from jserve.grammar.llguidance_backend import LLGuidanceBackend

    llguidance = LLGuidanceBackend(vocabulary)
    if name == "llguidance":
        return llguidance
    return ByKind({"json": llguidance, "regex": llguidance}, lambda: _xgrammar(vocabulary))


def _xgrammar(vocabulary: Vocabulary) -> Backend:
    from jserve.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


class ByKind:
    """Some kinds to a backend of their own.

    JSON schemas and regular expressions go to llguidance: it enforces many more keywords, and
    enforces them right (docs/grammar-conformance.md); for regular expressions its masks took 0.1 ms
    and a payload of 0.2 kB where xgrammar took 0.9 ms and 359 kB.
    """

    def __init__(self, special: dict[str, Backend], make_usual: Callable[[], Backend]) -> None:
        self._special, self._make_usual = special, make_usual
        self._usual: Backend | None = None
        self._lock = threading.Lock()

    def prepare(self, kind: str) -> None:
        self._of(kind)

    def compile(self, spec: GrammarSpec) -> bytes:
        kind = spec.kind if spec.kind in self._special else ""
        return kind.encode() + b"\0" + self._of(kind).compile(spec)

    def load(self, payload: bytes) -> Template:
        kind, _, rest = payload.partition(b"\0")
        return self._of(kind.decode()).load(rest)

    def _of(self, kind: str) -> Backend:
        if kind in self._special:
            return self._special[kind]
        with self._lock:
            if self._usual is None:  # xgrammar takes seconds to import
                self._usual = self._make_usual()
            return self._usual
