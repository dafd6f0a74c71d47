"""The stream executor: a queue of expressions, done one after the other on a backend.

Owns the queue of one branch of a program, its worker (a task on the backend's loop), and its end,
also by failure or cancellation. What expressions do is execution.py's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import uuid
import warnings
from typing import Any

from jserve.lang import ir
from jserve.lang.backends.base import Backend
from jserve.lang.board import Board
from jserve.lang.errors import ExpressionError, ProgramCancelled, ProgramError
from jserve.lang.execution import Execution
from jserve.lang.record import Step
from jserve.lang.sampling import Sampling
from jserve.lang.shown import shown
from jserve.lang.site import Site, caller
from jserve.lang.transcript import Transcript


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """How a program runs. `stream`: readers get text as it comes. `threaded`: expressions are done
    beside the program, not while it adds them. `detached`: the program's function runs in a thread
    that its readers do not wait for."""

    stream: bool = False
    threaded: bool = True
    detached: bool = False


class StreamExecutor:
    """One branch of a program. Its methods are for the program's thread, `cancel` is for any."""

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        mode: Mode,
        board: Board,
        transcript: Transcript,
    ) -> None:
        self.sid = uuid.uuid4().hex
        self.backend, self.sampling, self.mode, self.board = backend, sampling, mode, board
        self.transcript = transcript
        self.fork_start_text_pos, self.fork_start_role = board.length, transcript.role
        self.children: list[StreamExecutor] = []
        self.execution = Execution(backend, sampling, transcript, mode.stream)
        self._queue: asyncio.Queue[tuple[ir.Expr, Site] | None] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._inline: concurrent.futures.Future[None] | None = None
        self._site = caller()  # of what was submitted last
        self._cancelled = self._ending = False

    def __repr__(self) -> str:
        return shown("the executor of a program")

    @property
    def steps(self) -> list[Step]:
        return self.execution.steps

    def submit(self, value: Any) -> None:
        """Queue what `s += value` says. Raises ExpressionError; without a worker also ProgramError.

        After a failure nothing is done any more: who reads a value gets it.
        """
        if self._ending:
            raise ExpressionError("this part of the program is over: nothing can be added to it.")
        self._site = site = caller()
        for expr in ir.parts(ir.as_expr(value)):
            if self.board.error is not None:
                self.board.declare(ir.names(expr))
                continue
            self.board.expect(ir.names(expr))
            if not self.mode.threaded:
                self._do_now(expr, site)
            elif not self.backend.loop.soon(self._enqueue, (expr, site)):
                self.board.fail(self._cancellation("its backend was shut down"))

    def fork(self, size: int) -> list[StreamExecutor]:
        """Branches that go on from here. Text that they share and the backend has not seen is
        computed once before. Waits for what is queued and raises its failure."""
        if size > 1:
            self.submit(ir.Commit(size))
        self.sync()
        if (error := self.board.error) is not None:
            raise error
        values = self.board.values
        branches = []
        for _ in range(size):
            board = Board(self.mode.stream, text=self.board.text, values=values)
            transcript = self.transcript.branch(board)
            branch = StreamExecutor(self.backend, self.sampling, self.mode, board, transcript)
            branch.execution.seen = self.execution.seen
            branches.append(branch)
        self.children += branches
        self.steps.append(
            Step("fork", caller(), detail=f"{size}", branches=[one.steps for one in branches])
        )
        if self._cancelled:
            self.cancel()  # it came in between
        return branches

    def sync(self) -> None:
        """Wait for what is queued."""
        self.board.wait_idle()

    def end(self) -> None:
        """Nothing more will be submitted, here or in branches: the worker ends when it has done
        what is queued. Does not wait."""
        if self._ending:
            return
        self._ending = True
        for child in self.children:
            child.end()
        if not (self.mode.threaded and self.backend.loop.soon(self._enqueue, None)):
            self.board.end()

    def wait(self) -> None:
        """Until this branch and those from it are over."""
        self.board.wait_end()
        for child in self.children:
            child.wait()

    def cancel(self) -> None:
        """End it now: calls under way are aborted, who waits for a value gets ProgramCancelled."""
        self._cancelled = True
        if not self.board.ended:
            self.board.fail(self._cancellation("it was cancelled"))
        if self._inline is not None:
            self._inline.cancel()
        self.backend.loop.soon(self._stop)
        for child in self.children:
            child.cancel()

    def fail(self, error: BaseException) -> None:
        """The program's function raised: what is under way ends, in branches too."""
        self.board.fail(error)
        self.backend.loop.soon(self._stop)
        for child in self.children:
            child.cancel()

    def _do_now(self, expr: ir.Expr, site: Site) -> None:
        """Without a worker. Raises the failure."""
        self._inline = self.backend.loop.submit(self._do(expr, site))
        try:
            self._inline.result()
        except concurrent.futures.CancelledError:
            self.board.fail(self._cancellation("its backend was shut down"))
        except BaseException:  # an interrupt
            self._inline.cancel()
            raise
        if (error := self.board.error) is not None:
            raise error

    def _cancellation(self, why: str) -> ProgramCancelled:
        return ProgramCancelled(self._site, "the program", why)

    # On the loop.

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.cancel()

    def _enqueue(self, item: tuple[ir.Expr, Site] | None) -> None:
        self._queue.put_nowait(item)
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self.board.error is None and (item := await self._queue.get()) is not None:
                await self._do(*item)
        except asyncio.CancelledError:
            self.board.fail(self._cancellation("its backend was shut down"))
        finally:
            self.board.end()

    async def _do(self, expr: ir.Expr, site: Site) -> None:
        try:
            await self.execution.execute(expr, site)
        except Exception as error:  # whatever it is: it belongs to who reads the value
            failure = ProgramError(*ir.described(expr, site), error)
            failure.__cause__ = error
            self.board.fail(failure)
            _warn(failure)
        finally:
            self.board.done_one()


class ProgramWarning(UserWarning):
    """A program's call failed; who reads its value gets the error."""


def _warn(failure: ProgramError) -> None:
    """At the program's line. Where warnings are errors, the failure is told once all the same."""
    with contextlib.suppress(ProgramWarning):
        site = failure.site
        warnings.warn_explicit(str(failure), ProgramWarning, site.file, site.line)
