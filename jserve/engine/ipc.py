"""A Channel between two processes: ZMQ PUSH/PULL each way, msgpack of the tagged unions of types.

Knows nothing of what a message means.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from jserve.engine.sockets import open_sockets

logger = logging.getLogger("jserve.engine")

_CONNECT_TIMEOUT = 2000  # ms
_In = TypeVar("_In")
_Out = TypeVar("_Out", contravariant=True)


class ZmqEnd(Generic[_In, _Out]):
    """Binds when it has the directory of the sockets, which it then removes; connects otherwise."""

    def __init__(self, incoming: Any, inbox: str, outbox: str, directory: str = "") -> None:
        self._pull, self._push, self._release = open_sockets(self, inbox, outbox, directory)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._reached = not directory  # a connecting socket queues from the start
        self._lock = threading.Lock()  # sockets are for one thread at a time

    def send(self, message: _Out) -> None:
        with self._lock:
            if self._push.closed:
                return
            if not self._reached:  # the other process may be connecting still
                self._reached = bool(self._push.poll(_CONNECT_TIMEOUT, zmq.POLLOUT))
            with contextlib.suppress(zmq.Again):  # it is gone
                self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    def drain(self) -> list[_In]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._pull.recv(zmq.NOBLOCK)
                try:
                    messages.append(self._decoder.decode(data))
                except msgspec.DecodeError as error:  # one that nobody may send ends nothing
                    logger.error("a message was dropped, for it cannot be read", exc_info=error)
        return messages

    def wait(self, timeout: float, sentinel: int | None = None) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        if sentinel is not None:
            poller.register(sentinel, zmq.POLLIN)
        poller.poll(int(timeout * 1000))

    def close(self) -> None:
        """Give the last messages a second to leave."""
        with self._lock:
            self._release()
