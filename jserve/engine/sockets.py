"""The two ZMQ sockets of an end of a channel: how they are made and how they are let go.

Knows nothing of what is sent through them.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import zmq

_Socket = zmq.Socket[Any]


def open_sockets(
    owner: object, inbox: str, outbox: str, directory: str
) -> tuple[_Socket, _Socket, Callable[[], object]]:
    """One that receives, one that sends, and what closes them: at the latest when `owner` is gone.

    They are bound if this end has the `directory` that they are in, which is then removed; else
    they are connected.
    """
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    # Collected together, a context may wait for sockets that are never closed: keep them apart.
    release = weakref.finalize(owner, _release, os.getpid(), context, pull, push, directory)
    release.atexit = False
    for socket, url in ((pull, inbox), (push, outbox)):
        socket.set_hwm(0)
        (socket.bind if directory else socket.connect)(url)
    return pull, push, release


def _release(
    pid: int, context: zmq.Context[Any], pull: _Socket, push: _Socket, directory: str
) -> None:
    if os.getpid() != pid:
        return  # a forked process: they are not its own, and their threads are not in it
    pull.close(linger=0)
    push.close(linger=0 if directory else 1000)
    context.term()
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
