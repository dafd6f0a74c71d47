"""Processes of our own, spawned without a trace of the program that asks for them.

Python's `spawn` runs the caller's main file again in each child. Here a child imports what its
target and arguments name, and nothing else: a script needs no guard, and may come from stdin. What
a child does, and how it is ended, is its owner's; a process that the owner forks leaves it alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import multiprocessing.process
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FunctionType, ModuleType
from typing import Any

from jserve.errors import ConfigError

_hiding = threading.Lock()  # one stand-in at a time
_ours: weakref.WeakSet[SpawnProcess] = weakref.WeakSet()  # all that this process has started


def start_process(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str
) -> SpawnProcess:
    """A daemon process that has started. Raises ConfigError for what it could not import, because
    that lives in the caller's main file."""
    _Check(io.BytesIO()).dump((target, arguments))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments, name=name, daemon=True)
    _disown_when_forked()
    _ours.add(process)
    with _hiding, _main_hidden():
        process.start()
    return process


@functools.cache
def _disown_when_forked() -> None:
    os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    """In a process that os.fork made, and which ends with sys.exit: there multiprocessing would
    terminate what it takes for its own children, and then fail to wait for them. (Those that it
    forks itself forget them as they begin.)"""
    children: set[Any] = multiprocessing.process._children  # pyright: ignore[reportAttributeAccessIssue]
    children.difference_update(_ours)


class _Check(pickle.Pickler):
    """Pickles what a process is given, for nothing but to see which names that needs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Connection):  # can only be sent while a process starts
            return object, ()
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            rule = "it is defined in __main__, which jserve's processes do not import"
            raise ConfigError(f"{obj.__qualname__}: {rule}; move it to a module of its own")
        return NotImplemented


class _StandIn(ModuleType):
    """To the thread that made it, a main module from no file; to others, which may look something
    up in the meantime, the real one. Once it has been asked for its file it has done its work."""

    def __init__(self, main: ModuleType) -> None:
        super().__init__("__main__")
        self.__dict__.clear()  # each look-up comes to __getattr__
        self.__dict__.update(_main=main, _starter=threading.get_ident())

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._starter:
            return getattr(self._main, name)
        if name == "__spec__":
            return None
        sys.modules["__main__"] = self._main
        raise AttributeError(f"module '__main__' has no attribute {name!r}")


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """`spawn` tells a child the __spec__ and the __file__ of this module, if it has them."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = _StandIn(main)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
