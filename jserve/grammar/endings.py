"""What the end of a process that compiled a grammar says of the grammar."""

from __future__ import annotations

import signal
from collections.abc import Mapping

_STACK = (
    "it leads too deep for what compiles it: parts lie in each other, or lead to each other by "
    "$ref or by rules, too many times; make it flatter"
)
_MEMORY = (
    "its compilation ended its process, probably for want of memory: it may use {memory_mb} MB; "
    "make it smaller"
)
#: By signal. A library that gets no memory aborts, and the system kills what takes too much of it.
_BY_SIGNAL: Mapping[int, str] = {
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS), _STACK),
    **dict.fromkeys((signal.SIGABRT, signal.SIGKILL), _MEMORY),
}
_OTHER = "its compilation ended its process, for no known reason (status {status}); simplify it"


def ended(status: int | None, memory_mb: int) -> str:
    """`status` is a negative signal, or what the process returned."""
    words = _BY_SIGNAL.get(-(status or 0), _OTHER)
    return words.format(memory_mb=memory_mb, status=status)
