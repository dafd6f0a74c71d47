"""Requests whose grammars are being loaded. One that ends here never reaches the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jserve.engine.channel import EngineEnd
from jserve.engine.refusals import refused
from jserve.grammar.templates import Loading, Templates
from jserve.types import Abort, Control, Delta, Deltas, FinishReason, Submit, ToEngine


class GrammarQueue:
    def __init__(self, templates: Templates) -> None:
        self.waiting: dict[str, tuple[Submit, Loading]] = {}
        self._templates = templates
        self._passed: list[ToEngine] = []
        self._deltas: list[Delta] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            Control: self._control,
        }

    def sift(self, messages: Sequence[ToEngine], channel: EngineEnd) -> list[ToEngine]:
        """What the loop may have now. Requests that end here are told so over `channel`."""
        for message in messages:
            self._handlers[type(message)](message)
        self._release()
        if self._deltas:
            channel.send(Deltas(items=self._deltas))
        passed, self._passed, self._deltas = self._passed, [], []
        return passed

    def _submit(self, submit: Submit) -> None:
        if submit.grammar is None:
            self._passed.append(submit)
        else:
            self.waiting[submit.rid] = submit, self._templates.load(submit.grammar)

    def _release(self) -> None:
        ready = [rid for rid, (_, loading) in self.waiting.items() if loading.done()]
        for rid in ready:
            submit, loading = self.waiting.pop(rid)
            error = loading.exception()
            if error is None:
                self._passed.append(submit)
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
        self._passed.append(control)
        if control.op == "pause_generation" and control.args.get("mode", "abort") == "abort":
            for rid in list(self.waiting):
                self._end(rid, told=True)

    def _end(self, rid: str, told: bool) -> None:
        submit, _ = self.waiting.pop(rid)
        if told:
            finish = FinishReason(type="abort", message="The request was aborted.")
            self._deltas.append(Delta(rid=rid, turn=submit.turn, token_ids=[], finish=finish))
