"""A program without a model: what it would add, as far as that does not depend on what comes back.

Owns the state that a traced function gets in place of a ProgramState, and the text that every run
begins with. Arguments that are not known, and generated values, cannot be looked into; a trace ends
where a function tries, or where it goes on beyond its bounds (bounds.py).
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jserve.lang import ir
from jserve.lang.backends.base import Backend
from jserve.lang.board import Board
from jserve.lang.bounds import Bounds
from jserve.lang.errors import ExpressionError
from jserve.lang.named_templates import named_template
from jserve.lang.record import Step
from jserve.lang.roles import RoleTemplate
from jserve.lang.shown import shown
from jserve.lang.site import Site, caller, innermost
from jserve.lang.state import Bracket, each, role
from jserve.lang.transcript import Transcript
from jserve.types.wording import written

_T = TypeVar("_T")
#: Operations of a program that are traced: for its picture, and for the text that all runs share.
MOST_SHOWN, MOST_SHARED = 1_000, 10_000
MOST_SECONDS = 10.0  # of a traced program, whatever it does
_CURRENT: contextvars.ContextVar[TracerProgramState | None] = contextvars.ContextVar(
    "jserve_lang_tracer", default=None
)


def current() -> TracerProgramState | None:
    """The trace that this thread is in."""
    return _CURRENT.get()


def dummies(parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """A stand-in for every parameter that must be given."""
    return {
        one.name: ir.Argument(one.name)
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def trace(
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    backend: Backend | None,
    prefix_only: bool = False,
) -> TracerProgramState:
    """Call `func` with a tracer. With `prefix_only` as far as its text is constant."""
    bounds = Bounds(MOST_SHARED if prefix_only else MOST_SHOWN, MOST_SECONDS)
    tracer = TracerProgramState(_Templates(backend), Transcript(Board()), bounds, prefix_only)

    def call() -> None:
        _CURRENT.set(tracer)
        tracer.ret_value = func(tracer, **arguments)

    try:
        bounds.run(call)
    except Exception as error:  # users' code meets values that are none: anything may come of it
        tracer.end(innermost(error) or caller(), f"{type(error).__name__}: {error}")
    if bounds.why is not None:
        tracer.give_up(bounds.why, bounds.stopped)
    return tracer


class TracerProgramState:
    """Stands for `s`. `steps` is the program's tree, `prefix` the text that all runs begin with;
    `ended` is the last step of a trace that could not go on, `hung` whether it would not end."""

    def __init__(
        self,
        templates: _Templates,
        transcript: Transcript,
        bounds: Bounds,
        prefix_only: bool = False,
    ) -> None:
        self.steps: list[Step] = []
        self.ret_value: Any = None
        self.ended: Step | None = None
        self.hung = False
        self._templates, self._transcript, self._bounds = templates, transcript, bounds
        self._prefix_only, self._constant = prefix_only, True
        self._prefix_len = 0
        self._values: dict[str, Any] = {}

    def __repr__(self) -> str:
        return shown("the state of a program")

    @property
    def prefix(self) -> str:
        return self._transcript.board.text[: self._prefix_len]

    def end(self, site: Site, why: str) -> None:
        self.ended = Step("end", site, text=why)
        self.steps.append(self.ended)

    def give_up(self, why: str, where: Site | None) -> None:
        """The program did not end. What it wrote as long as nothing was unknown may be what it
        does without values: no run has to begin with that."""
        last = self.steps[-1].site if self.steps else caller()
        self.end(where or last, f"the program did not end while traced: {why}")
        self.hung = True
        if self._constant:
            self._prefix_len = 0

    def __iadd__(self, other: Any) -> TracerProgramState:
        parts, site = ir.parts(ir.as_expr(other)), caller()
        self._bounds.count(len(parts) or 1)
        for expr in parts:
            self._add(expr, site)
        return self

    def call(self, func: Callable[..., Any], arguments: Mapping[str, Any]) -> TracerProgramState:
        """Another program, called by this one: its own tree."""
        self._bounds.count()
        self._open("call", func.__name__)
        inner = TracerProgramState(self._templates, Transcript(Board()), self._bounds)
        self.steps.append(Step("call", caller(), func.__name__, branches=[inner.steps]))
        inner.ret_value = func(inner, **arguments)
        return inner

    def system(self, expr: Any = None) -> ir.Said | Bracket:
        return role(self, "system", expr)

    def user(self, expr: Any = None) -> ir.Said | Bracket:
        return role(self, "user", expr)

    def assistant(self, expr: Any = None) -> ir.Said | Bracket:
        return role(self, "assistant", expr)

    def var_scope(self, name: str) -> Bracket:
        return Bracket(self, ir.ScopeBegin(name), ir.ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> _Branches:
        self._bounds.count(size)
        self._open("fork", str(size))
        branches = [
            TracerProgramState(self._templates, self._transcript.branch(Board()), self._bounds)
            for _ in range(size)
        ]
        for branch in branches:
            branch._values = dict(self._values)
        steps = [branch.steps for branch in branches]
        self.steps.append(Step("fork", caller(), detail=str(size), branches=steps))
        return _Branches(self, branches)

    def copy(self) -> _Copy:
        return _Copy(self.fork(1))

    def text(self) -> Any:
        self._bounds.count()
        return ir.Variable("text()")

    def messages(self) -> Any:
        self._bounds.count()
        return ir.Variable("messages()")

    def sync(self) -> None:
        self._bounds.count()

    def error(self) -> None:
        self._bounds.count()

    def text_iter(self, var_name: str | None = None) -> Any:
        self._bounds.count()
        return ir.Variable(var_name or "text()")

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        self._bounds.count()
        if name not in self._values:
            raise KeyError(f"the program has no variable {written(name)} here")
        return self._values[name]

    def set_var(self, name: str, value: Any) -> None:
        self._bounds.count()
        self._values[name] = value

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        self._bounds.count()
        return ir.Variable(f"{name}'s meta information")

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        self._bounds.count()
        return name in self._values

    def _add(self, expr: ir.Expr, site: Site) -> None:
        for name in ir.names(expr):
            self._values[name] = ir.Variable(name)
        if isinstance(expr, ir.ExprList):
            for part in expr.items:
                self._add(part, site)
        elif isinstance(expr, ir.SeparateReasoning):
            for part in ir.parts(expr.expr):
                self._add(part, site)
        elif isinstance(expr, ir.Text):
            self._write("text", None, site, lambda: self._transcript.write(expr.value))
        elif isinstance(expr, ir.RoleBegin):
            begin = self._transcript.begin
            self._write("role", expr.role, site, lambda: self._templates.do(begin, expr.role))
        elif isinstance(expr, ir.RoleEnd):
            end = self._transcript.end
            self._write("role", None, site, lambda: self._templates.do(end, expr.role))
        elif not isinstance(expr, ir.ScopeBegin | ir.ScopeEnd):
            self._unknown(expr, site)

    def _write(self, kind: str, name: str | None, site: Site, write: Callable[[], Any]) -> None:
        board = self._transcript.board
        before = board.length
        write()
        self.steps.append(Step(kind, site, name, board.since(before)))
        if self._constant:
            self._prefix_len = board.length

    def _unknown(self, expr: ir.Expr, site: Site) -> None:
        if isinstance(expr, ir.Gen):
            self._open("gen", expr.name, expr.site, expr.sampling.constraint or "")
        elif isinstance(expr, ir.Select):
            detail = f"{expr.method.name} of {len(expr.choices)}: {', '.join(expr.choices)}"
            self._open("select", expr.name, expr.site, detail)
        elif isinstance(expr, ir.Argument | ir.Variable):
            kind = "argument" if isinstance(expr, ir.Argument) else "variable"
            self._open(kind, expr.name, site)

    def _open(
        self, kind: str, name: str | None, site: Site | None = None, detail: str = ""
    ) -> None:
        """The text is not constant from here on."""
        if self._prefix_only:
            self._bounds.stop()
        self._constant = False
        if site is not None:
            self.steps.append(Step(kind, site, name, detail=detail))


class _Branches:
    """The branches of a traced fork."""

    def __init__(self, source: TracerProgramState, states: list[TracerProgramState]) -> None:
        self._source, self._states = source, states

    def __repr__(self) -> str:
        return shown(f"a fork of {len(self)}")

    def join(self, mode: str = "gather_variable") -> None:
        self._source._bounds.count()
        if mode != "gather_variable":
            self._source += ir.Variable("the branches' text")
            return
        known = set(self._source._values)
        for name in dict.fromkeys(name for state in self._states for name in state._values):
            if name not in known:
                values = [state._values[name] for state in self._states if name in state._values]
                self._source.set_var(name, values)

    def __getitem__(self, index: int) -> TracerProgramState:
        return self._states[index]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[TracerProgramState]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> _Branches:
        for state, expr in zip(self._states, each(other, len(self._states)), strict=True):
            state += expr
        return self


class _Copy:
    def __init__(self, branches: _Branches) -> None:
        self._branches = branches

    def __repr__(self) -> str:
        return shown("a copy of a state")

    def __enter__(self) -> TracerProgramState:
        return self._branches[0]

    def __exit__(self, *_: object) -> None:
        self._branches.join()


class _Templates:
    """Roles as the backend's template has them; without a backend as "default" does."""

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend
        self._default = named_template("default")

    def do(
        self, change: Callable[[str, RoleTemplate], Coroutine[Any, Any, None]], role: str
    ) -> None:
        """`change` is a Transcript's `begin` or `end`."""
        backend = self._backend
        if backend is None:
            _at_once(change(role, self._default))
            return

        async def with_template() -> None:
            await change(role, await backend.template())

        backend.loop.call(with_template())


def _at_once(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise ExpressionError("this chat template cannot be rendered here")
