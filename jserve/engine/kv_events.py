"""KV events on ZMQ: what the cache's observer hears, hashed and published by a thread of its own.

    PUB     topic | sequence number (8 bytes, big-endian) | msgpack [timestamp, events, rank]
    ROUTER  ← "" | first number wanted
            → "" | number | payload, for each batch that is kept; at the end "" | −1 | ""

The engine's thread only appends to a queue. When that is full, because hashing cannot keep up, the
changes until it is empty are left out, and AllBlocksCleared stands for them: subscribers then know
of less than is cached, never of more. Nor can they hold up the thread that sends: ZMQ drops what a
slow one does not take, who sees a gap in the numbers and asks for a replay.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from jserve.cache.events import EventBatch, EventRecorder, KvEvent
from jserve.cache.observer import NO_OBSERVER, Observer
from jserve.cache.radix import Namespace
from jserve.config import KvEventsOptions
from jserve.errors import ConfigError

logger = logging.getLogger("jserve.engine")

END = (-1).to_bytes(8, "big", signed=True)
_POLL = 0.05  # seconds: how long a replay or a close may have to wait
_MAX_BATCH = 1000  # changes in one message
_LINGER = 200  # ms for the last messages to leave

_Change = Callable[[], KvEvent | None]


def open_kv_events(
    options: KvEventsOptions | None, num_pages: int, page_size: int
) -> tuple[Observer, Callable[[], None]]:
    """The observer for a cache of that size, and what ends it. Raises ConfigError."""
    if options is None:
        return NO_OBSERVER, lambda: None
    publisher = KvEventPublisher(options, num_pages, page_size)
    return publisher.observer, publisher.close


class KvEventPublisher:
    """Publishes from its construction on. `observer` is for one cache, on one thread."""

    def __init__(self, options: KvEventsOptions, num_pages: int, page_size: int) -> None:
        self._recorder = EventRecorder(num_pages, page_size)
        self._num_held = 0  # pages; the engine's thread counts them
        self._most, self._behind = options.max_queue_size, False
        self._changes: queue.SimpleQueue[_Change] = queue.SimpleQueue()
        self._sender = _Sender(options)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.observer = Observer(self._stored, self._removed, self._cleared, lambda: self._num_held)

    def close(self) -> None:
        """Publish what is queued, and end."""
        self._closing.set()
        self._thread.join()

    # The engine's thread.

    def _stored(
        self, parent: np.ndarray, tokens: np.ndarray, pages: np.ndarray, namespace: Namespace
    ) -> None:
        self._num_held += len(pages)
        self._put(lambda: self._recorder.stored(parent, tokens, pages, namespace))

    def _removed(self, pages: np.ndarray) -> None:
        self._num_held -= len(pages)
        self._put(lambda: self._recorder.removed(pages))

    def _cleared(self) -> None:
        self._num_held = 0
        self._put(self._recorder.cleared)

    def _put(self, change: _Change) -> None:
        num_waiting = self._changes.qsize()
        self._behind = self._behind and num_waiting > 0
        if self._behind or not self._thread.is_alive():
            return
        if num_waiting >= self._most:
            self._behind, change = True, self._recorder.cleared
            logger.warning("KV events: %d changes wait; the next are not published", num_waiting)
        self._changes.put(change)

    # The publishing thread.

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._changes.empty()):
                made = (change() for change in self._take())
                if events := [event for event in made if event is not None]:
                    self._sender.publish(events)
                self._sender.answer_replays()
        except Exception as error:  # the thread's top: the engine serves on without events
            logger.critical("no more KV events are published", exc_info=error)
        finally:
            self._sender.close()

    def _take(self) -> list[_Change]:
        """What has come, waiting a moment for the first."""
        changes: list[_Change] = []
        with contextlib.suppress(queue.Empty):
            changes.append(self._changes.get(timeout=_POLL))
            while len(changes) < _MAX_BATCH:
                changes.append(self._changes.get_nowait())
        return changes


class _Sender:
    """The sockets, the sequence number, and the batches kept for replay."""

    def __init__(self, options: KvEventsOptions) -> None:
        self._topic, self._rank = options.topic.encode(), options.rank
        self._kept: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=options.buffer_steps
        )
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(options.hwm)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            endpoint = options.endpoint
            local = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
            (self._publish.bind if local else self._publish.connect)(endpoint)
            if options.replay_endpoint is not None:
                endpoint = options.replay_endpoint
                self._replay.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-config: no socket at {endpoint}: {error}") from None

    def publish(self, events: list[KvEvent]) -> None:
        batch = EventBatch(ts=time.time(), events=events, attn_dp_rank=self._rank)
        number, payload = self._sequence.to_bytes(8, "big"), self._encoder.encode(batch)
        self._sequence += 1
        self._kept.append((number, payload))
        self._send(self._publish, self._topic, number, payload)

    def answer_replays(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                client, *_, first = self._replay.recv_multipart(zmq.NOBLOCK)
                for number, payload in list(self._kept):
                    if number >= first:  # 8 bytes, big-endian: in the order of the numbers
                        self._send(self._replay, client, b"", number, payload)
                self._send(self._replay, client, b"", END, b"")

    def close(self) -> None:
        for socket in (self._publish, self._replay):
            socket.close(_LINGER)
        self._context.term()

    def _send(self, socket: zmq.Socket[Any], *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # ZMQ's own limit: it is a slow one's loss
            socket.send_multipart(frames, zmq.NOBLOCK)
