"""One engine made of several: --dp-size processes (or threads) behind one channel.

    Submit → engine/placement.py → a rank        Deltas, Gauges, Progress, replies ← merged
    Abort → the rank of its request, or all      Control → all that live; a flush twice: would any
                                                 refuse, and only if none would, do it

A rank that breaks takes its own open requests with it, and nothing else. One that lives and is deaf
(stopped from outside, or in a step that takes long) keeps its own open requests waiting, and holds
up no question to all for longer than `ANSWER_TIMEOUT`; then it is left aside until it is heard.
Knows ranks and messages; nothing of devices, nor of what a rank does with a message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from jserve.config import Config, Replica, num_replicas
from jserve.config.pages import least_page_size
from jserve.engine.channel import ApiEnd
from jserve.engine.local import local_ends
from jserve.engine.merging import JointProgress, JointReplies, merged_gauges
from jserve.engine.placement import Placement
from jserve.engine.process import EngineProcess, EngineThread
from jserve.engine.refusals import lost
from jserve.types import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    FromEngine,
    Gauges,
    Progress,
    Submit,
    ToEngine,
)

logger = logging.getLogger("jserve.engine")

ANSWER_TIMEOUT = 10.0  # seconds for an engine, or one rank of several, to answer a Control
_PATIENCE = 5.0  # seconds for a thread that follows a rank to see its end


class Worker(Protocol):
    """What an engine lives in, seen from outside; `sentinel` becomes readable when it ends."""

    channel: ApiEnd
    sentinel: int | None

    @property
    def alive(self) -> Callable[[], bool]: ...

    def cause(self) -> str:
        """Why it is not alive."""
        ...

    def stop(self, patience: float) -> None:
        """Wait so many seconds for it to end by itself, then end it if that can be done."""
        ...


def start_worker(config: Config, builder: str, inline: bool) -> Worker:
    """An engine in a process, or a thread when `inline`; as many as there are ranks."""
    kind, count = EngineThread if inline else EngineProcess, num_replicas(config.execution)
    if count == 1:
        return kind(config, builder)
    places = [Replica(rank, alone=not inline) for rank in range(count)]
    configs = [dataclasses.replace(config, replica=place) for place in places]
    options = {"num_blocks": 0} if config.cache.disable_radix_cache else {}
    placement = Placement(count, least_page_size(config.cache), **options)
    with contextlib.ExitStack() as undo:  # when not all can be started
        workers: list[Worker] = []
        for one in configs:
            workers.append(kind(one, builder))
            undo.callback(workers[-1].stop, 0.0)
        undo.pop_all()
    return Ranks(workers, placement)


def answer_timeout(config: Config) -> float | None:
    """Seconds to wait for an answer; None where a Front answers for its ranks."""
    return ANSWER_TIMEOUT if num_replicas(config.execution) == 1 else None


class Ranks:
    """A worker made of workers, each followed by a thread. Dead when the last of them is, or when
    one does not start."""

    def __init__(self, workers: Sequence[Worker], placement: Placement) -> None:
        self.sentinel: int | None = None
        self._workers = workers
        self._front = Front([worker.channel for worker in workers], placement)
        self.channel: ApiEnd = self._front
        self._threads = [
            threading.Thread(target=self._follow, args=place, name="engine-rank", daemon=True)
            for place in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def alive(self) -> bool:
        return not self._front.ended

    def cause(self) -> str:
        return self._front.ended

    def stop(self, patience: float) -> None:
        self._front.closing = True
        deadline = time.monotonic() + patience
        with contextlib.ExitStack() as ends:  # of all, also when it is interrupted
            for worker in self._workers:
                ends.callback(worker.stop, 0.0)
            for worker, thread in zip(self._workers, self._threads, strict=True):
                left = deadline - time.monotonic() if thread.is_alive() else 0.0
                worker.stop(max(0.0, left))  # one that was lost has had its time
        deadline = time.monotonic() + _PATIENCE
        for worker, thread in zip(self._workers, self._threads, strict=True):
            if not worker.alive():  # a thread that hangs cannot be ended
                thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self, rank: int, worker: Worker) -> None:
        """Bring its messages to the front, until it ends or says that it will."""
        channel, failure = worker.channel, ""
        patience = 0.1 if worker.sentinel is None else 0.5  # a thread ends without a sign
        while worker.alive() and not failure:
            channel.wait(patience, worker.sentinel)
            failure = self._front.receive(rank, channel.drain())
            self._front.expire()
        if not failure:
            channel.wait(0.05)
            failure = self._front.receive(rank, channel.drain())  # its last words
        self._front.lose(rank, failure or worker.cause())
        channel.send(Control(id="shutdown", op="shutdown"))  # a thread that hung may go on
        worker.stop(0.0)
        channel.close()


class Front:
    """The ranks' channels as one. `ended`: why no rank can be used any more, or ""; `closing`: the
    ranks are expected to end."""

    def __init__(self, channels: Sequence[ApiEnd], placement: Placement) -> None:
        self.ended, self.closing = "", False
        self._channels, self._placement = channels, placement
        self._lock = threading.Lock()  # of all below
        self._living = dict.fromkeys(range(len(channels)))
        self._replies, self._progress = JointReplies(ANSWER_TIMEOUT), JointProgress(len(channels))
        self._gauges = {rank: Gauges(values={}) for rank in self._living}
        self._flushes: dict[str, Control] = {}  # put off until no rank would refuse
        self._flushing: set[str] = set()  # ids of those that were put to all
        inbox, outbox = local_ends()
        self.drain, self.wait, self._tell = inbox.drain, inbox.wait, outbox.send
        self._routes: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            Control: self._ask,
        }
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            Deltas: self._on_deltas,
            ControlReply: self._on_reply,
            Gauges: self._on_gauges,
            Progress: self._on_progress,
        }

    @property
    def flushing(self) -> bool:
        """Whether the ranks have been told to flush, and not all have replied."""
        return bool(self._flushing)

    def send(self, message: ToEngine) -> None:
        """Raises what Placement.place does."""
        self._routes[type(message)](message)

    def close(self) -> None:
        """Each rank's channel is closed by who follows it."""

    def receive(self, rank: int, messages: Sequence[FromEngine]) -> str:
        """Take in what a rank says; → why it is about to end, if it says so."""
        failure = ""
        if messages and rank in self._replies.deaf:
            self._hear(rank)
        for message in messages:
            self._handlers[type(message)](rank, message)
            if isinstance(message, Progress) and message.stage == "failed":
                failure = message.message
        return failure

    def expire(self) -> None:
        """End what has waited for a rank for too long. To be called twice a second or so."""
        with self._lock:
            if self.closing or not (replies := self._replies.expire()):
                return
            deaf = self._replies.deaf
            self._placement.deaf = frozenset(deaf)
            self._tell_gauges()
            for reply in replies:
                self._reply(reply)
        ranks = ", ".join(map(str, sorted(deaf)))
        logger.warning("data-parallel rank %s: no answer for %g s", ranks, ANSWER_TIMEOUT)

    def lose(self, rank: int, why: str) -> None:
        """It has ended: what it had open fails. One that had not started takes all with it."""
        ended = f"data-parallel rank {rank} ended: {why}"
        with self._lock:
            if self.closing:
                ended = "the engine was shut down"
            del self._living[rank], self._gauges[rank]
            if not self._living or not self._progress.ready:
                self.ended = self.ended or ended
            replies = self._replies.lose(rank)
            keys = self._placement.lose(rank)
            self._tell_gauges()
            if not self.ended:  # otherwise all that is open fails, whoever had it
                self._tell(Deltas(items=lost(keys, ended)))
            for reply in replies:
                self._reply(reply)
            left = ", ".join(map(str, self._living)) or "none"
        if not self.closing and self._progress.ready:
            logger.error("%s; open requests lost: %d; ranks left: %s", ended, len(keys), left)

    def _hear(self, rank: int) -> None:
        with self._lock:
            self._replies.deaf.discard(rank)
            self._placement.deaf = frozenset(self._replies.deaf)
            self._tell_gauges()
        logger.warning("data-parallel rank %d: heard again", rank)

    def _tell_gauges(self) -> None:
        """Of those that serve."""
        deaf = self._replies.deaf
        heard = {rank: one for rank, one in self._gauges.items() if rank not in deaf}
        self._tell(merged_gauges(heard or self._gauges))

    # From the API process.

    def _submit(self, submit: Submit) -> None:
        self._channels[self._placement.place(submit)].send(submit)

    def _abort(self, abort: Abort) -> None:
        if abort.abort_all or not abort.exact:
            self._to_all(abort)
        elif (rank := self._placement.rank_of(abort.rid)) is not None:
            self._channels[rank].send(abort)
            if abort.stopped:  # nothing more is heard of it
                self._placement.end(abort.rid)

    def _ask(self, control: Control) -> None:
        self.closing = self.closing or control.op == "shutdown"
        with self._lock:
            if control.op == "flush_cache":
                self._flushes[control.id] = control
                control = msgspec.structs.replace(control, op="may_flush")
            self._put(control)

    def _put(self, control: Control) -> None:
        self._replies.expect(control.id, self._living)
        self._to_all(control)

    def _to_all(self, message: ToEngine) -> None:
        for rank in tuple(self._living):
            self._channels[rank].send(message)

    # From the ranks, each in the thread that follows it.

    def _on_deltas(self, rank: int, message: Deltas) -> None:
        items = message.items
        for i, delta in enumerate(items):
            items[i] = msgspec.structs.replace(delta, dp_rank=rank)
            if delta.finish is not None:
                self._placement.end(delta.rid, delta.turn)
        self._tell(message)

    def _on_reply(self, rank: int, reply: ControlReply) -> None:
        with self._lock:
            joint = self._replies.take(rank, reply)
            if joint is not None:
                self._reply(joint)

    def _reply(self, joint: ControlReply) -> None:
        flush = self._flushes.pop(joint.id, None)
        if flush is not None and joint.ok:  # else it is refused, and no rank has lost anything
            self._flushing.add(joint.id)
            self._put(flush)
            return
        if joint.id in self._flushing:
            self._flushing.discard(joint.id)
            if joint.ok:
                self._placement.forget()
        self._tell(joint)

    def _on_gauges(self, rank: int, message: Gauges) -> None:
        with self._lock:
            self._gauges[rank] = message
            self._tell_gauges()

    def _on_progress(self, rank: int, message: Progress) -> None:
        with self._lock:
            if message.stage == "failed":
                if not self._progress.ready:
                    self._tell(message)
                return
            joint = self._progress.take(rank, message)
            if joint is None:
                return
            if joint.stage == "ready":
                self._replies.facts = frozenset(joint.payload)
                self._placement.slots = message.payload.get("max_running_requests", math.inf)
                self._tell_gauges()
            self._tell(joint)
