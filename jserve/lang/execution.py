"""What each kind of expression does: to the conversation, and on the backend.

Runs on the backend's loop, one expression at a time. Knows neither queues nor threads.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jserve.lang import ir
from jserve.lang.ahead import Ahead
from jserve.lang.backends.base import Backend, Generation, Prompt, Seen, Usage
from jserve.lang.board import LOGPROBS
from jserve.lang.errors import BackendError
from jserve.lang.pieces import Apart, OfNone, OfOne, Pieces
from jserve.lang.record import Step
from jserve.lang.sampling import Sampling
from jserve.lang.site import Site
from jserve.lang.transcript import Transcript
from jserve.parsers.reasoning import FORMATS, Splitter, split

#: Characters of new text that are worth a call of their own before branches share them.
MIN_COMMIT = 64


class Execution:
    """Executes the expressions of one branch; `steps` records them. `seen` is how much of the text
    went through the backend; `ahead` is for programs that look ahead."""

    def __init__(
        self, backend: Backend, sampling: Sampling, transcript: Transcript, stream: bool
    ) -> None:
        self._backend, self._sampling, self._transcript = backend, sampling, transcript
        self._board = transcript.board
        self._stream = stream
        self._splitter: Callable[[], Splitter] | None = None
        self._scopes: dict[str, int] = {}
        self.seen, self.ahead = Seen(), Ahead(None)
        self.steps: list[Step] = []

    async def execute(self, expr: ir.Expr, site: Site) -> None:
        await _TABLE[type(expr)](self, expr, site)

    async def _list(self, node: ir.ExprList, site: Site) -> None:
        for item in node.items:
            await self.execute(item, site)

    async def _text(self, node: ir.Text, site: Site) -> None:
        self._transcript.write(node.value)
        self.ahead.follow(node.value)
        self.steps.append(Step("text", site, text=node.value))

    async def _role_begin(self, node: ir.RoleBegin, site: Site) -> None:
        at = self._board.length
        await self._transcript.begin(node.role, await self._backend.template())
        self.ahead.follow(self._board.since(at))
        self.steps.append(Step("role", site, node.role, self._board.since(at)))

    async def _role_end(self, node: ir.RoleEnd, site: Site) -> None:
        at = self._board.length
        await self._transcript.end(node.role, await self._backend.template())
        self.ahead.follow(self._board.since(at))
        self.steps.append(Step("role", site, text=self._board.since(at)))

    async def _scope_begin(self, node: ir.ScopeBegin, site: Site) -> None:
        self._scopes[node.name] = self._board.length

    async def _scope_end(self, node: ir.ScopeEnd, site: Site) -> None:
        self._board.put(node.name, self._board.since(self._scopes.pop(node.name)))

    def _prompt(self, name: str | None) -> Prompt:
        transcript = self._transcript
        transcript.settle()
        messages = tuple(transcript.messages)
        role, opened = transcript.role, transcript.opened
        return Prompt(self._board.text, messages, role, opened, name, self.seen)

    async def _gen(self, node: ir.Gen, site: Site) -> None:
        asked = node.sampling.over(self._sampling)
        sampling = asked.resolved((await self._backend.template()).stops)
        prompt, started = self._prompt(node.name), time.perf_counter()
        step = Step("gen", node.site, node.name, detail=asked.constraint or "")
        self.steps.append(step)
        if self._stream and sampling.n == 1:
            answer = await self._streamed(prompt, sampling)
            first = answer.text
        else:
            answer = await self.ahead.generate(self._backend, prompt, sampling)
            first = answer.text if sampling.n == 1 else answer.text[0]
            self._transcript.write(first)
        step.text, step.usage, step.seconds = first, answer.usage, time.perf_counter() - started
        self.seen = Seen(self._board.length, answer.seen_tokens)
        if node.name is not None:
            self._publish(node.name, answer.text, answer.meta)

    async def _streamed(self, prompt: Prompt, sampling: Sampling) -> Generation:
        texts, last = [], Generation("", {}, Usage())
        pieces = self._pieces(prompt.name)
        async for last in self._backend.generate_stream(prompt, sampling):
            self._transcript.write(last.text)
            texts.append(last.text)
            for name, text in pieces.push(last.text):
                self._board.grow(name, text, last.meta)
        told = {key: value for key, value in last.meta.items() if key not in LOGPROBS}
        for name, text in pieces.finish():
            self._board.grow(name, text, told)
        return dataclasses.replace(last, text="".join(texts))

    def _pieces(self, name: str | None) -> Pieces:
        if name is None:
            return OfNone()
        return OfOne(name) if self._splitter is None else Apart(name, self._splitter())

    async def _select(self, node: ir.Select, site: Site) -> None:
        prompt, started = self._prompt(node.name), time.perf_counter()
        detail = f"{node.method.name} of {len(node.choices)}: {', '.join(node.choices)}"
        step = Step("select", node.site, node.name, detail=detail)
        self.steps.append(step)
        selection = await self._backend.select(prompt, node.choices, node.temperature, node.method)
        decision, step.usage = selection.decision, selection.usage
        self.ahead.follow(decision.decision)
        self._transcript.write(decision.decision)
        step.text, step.seconds = decision.decision, time.perf_counter() - started
        self.seen = Seen(self._board.length, selection.seen_tokens)
        if node.name is not None:
            self._publish(node.name, decision.decision, decision.meta_info)

    async def _commit(self, node: ir.Commit, site: Site) -> None:
        chars = self._board.length
        if not chars or (self.seen.chars and chars - self.seen.chars < MIN_COMMIT):
            return
        step, started = Step("commit", site, detail=f"{node.num_branches}"), time.perf_counter()
        done = await self._backend.commit(Prompt(self._board.text, seen=self.seen))
        self.seen = Seen(chars, done.seen_tokens)
        if done.usage.num_calls:
            step.usage, step.seconds = done.usage, time.perf_counter() - started
            self.steps.append(step)

    async def _separate_reasoning(self, node: ir.SeparateReasoning, site: Site) -> None:
        at_once = FORMATS[node.model_type.lower()].thinks_at_once
        self._splitter = functools.partial(Splitter, at_once)
        try:
            for part in ir.parts(node.expr):
                await self.execute(part, site)
        finally:
            self._splitter = None

    def _publish(self, name: str, value: Any, meta: Any) -> None:
        if self._splitter is not None:
            if not isinstance(value, str):
                raise BackendError("separate_reasoning takes one answer, not n of them")
            reasoning, value = split(value, self._splitter())
            self._board.put(ir.reasoning_name(name), reasoning, meta)
        self._board.put(name, value, meta)


#: What does which kind. Not a part of each object, so that none refers to itself: an object that
#: is dropped is gone at once, and with it its backend's thread.
_TABLE: dict[type, Callable[[Execution, Any, Site], Awaitable[None]]] = {
    ir.Text: Execution._text,
    ir.Gen: Execution._gen,
    ir.Select: Execution._select,
    ir.RoleBegin: Execution._role_begin,
    ir.RoleEnd: Execution._role_end,
    ir.ScopeBegin: Execution._scope_begin,
    ir.ScopeEnd: Execution._scope_end,
    ir.Commit: Execution._commit,
    ir.SeparateReasoning: Execution._separate_reasoning,
    ir.ExprList: Execution._list,
}
