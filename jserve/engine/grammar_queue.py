"""Requests whose grammars are being loaded, which may take a time. One that ends here never
reaches the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jserve.engine.channel import EngineEnd
from jserve.engine.refusals import aborted, refused
from jserve.errors import TimedOutError
from jserve.grammar.templates import Loading, Templates
from jserve.types import Abort, Control, ControlReply, Delta, Deltas, Submit, ToEngine


class GrammarQueue:
    """`paused`: whether the engine is, so that who waits does not keep its cache from a flush."""

    def __init__(self, templates: Templates, paused: Callable[[], bool]) -> None:
        self.waiting: dict[str, tuple[Submit, Loading, float]] = {}  # since then, time.monotonic()
        self._templates, self._paused = templates, paused
        self._passed: list[ToEngine] = []
        self._deltas: list[Delta] = []
        self._replies: list[ControlReply] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            Control: self._control,
        }

    def sift(self, messages: Sequence[ToEngine], channel: EngineEnd) -> list[ToEngine]:
        """What the loop may have now. What ends here is told so over `channel`."""
        for message in messages:
            self._handlers[type(message)](message)
        self._release()
        if self._deltas:
            channel.send(Deltas(items=self._deltas))
        for reply in self._replies:
            channel.send(reply)
        passed, self._passed, self._deltas, self._replies = self._passed, [], [], []
        return passed

    def _submit(self, submit: Submit) -> None:
        if submit.grammar is None:
            self._passed.append(submit)
            return
        try:
            grammar, loading = self._templates.share(submit.grammar)  # no step must load it again
        except Exception as error:  # one bad request must not end the others
            self._deltas.append(refused(submit, error))
            return
        submit = msgspec.structs.replace(submit, grammar=grammar)
        self.waiting[submit.rid] = submit, loading, time.monotonic()

    def _release(self) -> None:
        now, most = time.monotonic(), self._templates.seconds
        over = [r for r, (_, one, t) in self.waiting.items() if one.done() or now - t > most]
        for rid in over:
            submit, loading, since = self.waiting.pop(rid)
            error = loading.exception() if loading.done() else _too_late(most)
            if error is None:
                waited = submit.waited + now - since
                self._passed.append(msgspec.structs.replace(submit, waited=waited))
            else:
                cause = error if isinstance(error, Exception) else RuntimeError(repr(error))
                self._deltas.append(refused(submit, cause))

    def _abort(self, abort: Abort) -> None:
        self._passed.append(abort)
        for rid in list(self.waiting):
            named = rid == abort.rid if abort.exact else abort.rid and rid.startswith(abort.rid)
            if abort.abort_all or named:
                self._end(rid, told=not abort.stopped)

    def _control(self, control: Control) -> None:
        flush = control.op in ("may_flush", "flush_cache")
        if flush and self.waiting and not self._paused():
            self._replies.append(ControlReply(id=control.id, ok=False))
            return
        self._passed.append(control)
        if control.op == "pause_generation" and control.args.get("mode", "abort") == "abort":
            for rid in list(self.waiting):
                self._end(rid, told=True)

    def _end(self, rid: str, told: bool) -> None:
        submit, *_ = self.waiting.pop(rid)
        if told:
            self._deltas.append(aborted(submit))


def _too_late(seconds: float) -> TimedOutError:
    why = f"waited for longer than {seconds:g} s (--grammar-compile-timeout)"
    return TimedOutError(f"The request {why}, for its grammar to be loaded.")
