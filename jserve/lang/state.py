"""What a program holds in its hands as `s`: it adds expressions and reads values.

Owns the words of the language, none of the work, which is the executor's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from jserve.lang import api, ir
from jserve.lang.backends.base import Usage
from jserve.lang.board import FailedValue
from jserve.lang.errors import ExpressionError
from jserve.lang.executor import StreamExecutor
from jserve.lang.record import Step, all_steps, total_usage
from jserve.lang.said import said_again
from jserve.lang.shown import shown
from jserve.lang.site import caller
from jserve.types.wording import written

_MOST_BRANCHES = 10_000  # of one fork
_JOINS = ("gather_variable", "concate_and_append")


class ProgramState:
    """The state of one branch. Values are read by `s["name"]`, which waits for them and raises
    ProgramError, naming the program's line, when they cannot come."""

    def __init__(self, executor: StreamExecutor) -> None:
        self.stream_executor = executor
        self._returned: Any = None
        self._block: Bracket | None = None  # the last one that was made here

    def __repr__(self) -> str:
        return shown("the state of a program")

    def __iadd__(self, other: ir.Addable) -> ProgramState:
        if other is None:
            raise ExpressionError("s += takes text or an expression, got None.")
        self.check_blocks()
        self.stream_executor.submit(other)
        return self

    @overload
    def system(self, expr: None = None) -> Bracket: ...
    @overload
    def system(self, expr: ir.Addable) -> ir.Said: ...
    def system(self, expr: ir.Addable | None = None) -> ir.Said | Bracket:
        """`s.system(x)` adds a system message; `with s.system():` one of what is added inside."""
        return self._watched(role(self, "system", expr))

    @overload
    def user(self, expr: None = None) -> Bracket: ...
    @overload
    def user(self, expr: ir.Addable) -> ir.Said: ...
    def user(self, expr: ir.Addable | None = None) -> ir.Said | Bracket:
        """As `system`, a user's message."""
        return self._watched(role(self, "user", expr))

    @overload
    def assistant(self, expr: None = None) -> Bracket: ...
    @overload
    def assistant(self, expr: ir.Addable) -> ir.Said: ...
    def assistant(self, expr: ir.Addable | None = None) -> ir.Said | Bracket:
        """As `system`, an assistant's message, usually with a gen in it."""
        return self._watched(role(self, "assistant", expr))

    def var_scope(self, name: str) -> Bracket:
        """`with s.var_scope("x"):` the text added inside is variable x."""
        return self._watched(Bracket(self, ir.ScopeBegin(name), ir.ScopeEnd(name)))

    def check_blocks(self) -> None:
        """Raises ExpressionError where s.user() stood without `with`: it would add nothing."""
        block, self._block = self._block, None
        if block is not None and not block.entered:
            raise ExpressionError(
                f"{block.site}: s.user(), s.user(None) and their like add nothing by themselves: "
                "write `with s.user():` around what the message holds, or s.user(text)."
            )

    def _watched(self, made: Any) -> Any:
        self.check_blocks()
        self._block = made if isinstance(made, Bracket) else None
        return made

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> Branches:
        """`size` branches that go on from here at the same time."""
        if position_ids_offset is not None:
            raise ExpressionError("fork: position_ids_offset is not supported.")
        if not isinstance(size, int) or not 1 <= size <= _MOST_BRANCHES:
            rule = f"size must be an integer in [1, {_MOST_BRANCHES}]"
            raise ExpressionError(f"fork: {rule}, got {written(size)}.")
        return Branches([ProgramState(one) for one in self.stream_executor.fork(size)], self)

    def copy(self) -> Copy:
        """`with s.copy() as c:` a branch whose new variables come back as lists of one."""
        return Copy(self)

    def text(self) -> str:
        """The whole text, when all that was added is done."""
        self.sync()
        return self.stream_executor.board.text

    def messages(self) -> list[dict[str, Any]]:
        """The whole messages so far, as OpenAI's API has them."""
        self.sync()
        return [
            {**message, "content": message["content"].lstrip()}
            for message in self.stream_executor.transcript.messages
        ]

    def sync(self) -> None:
        """Wait until all that was added is done."""
        self.stream_executor.sync()

    def error(self) -> BaseException | None:
        """What ended the program early, when all that was added is done."""
        self.sync()
        return self.stream_executor.board.error

    def cancel(self) -> None:
        """End the program and its branches now; calls under way are aborted. From any thread."""
        self.stream_executor.cancel()

    def text_iter(self, var_name: str | None = None) -> Generator[str, None, None]:
        """The text, or a variable, as it comes; once without stream=True. Raises ExpressionError
        for a variable that is no text, as that of n answers."""
        for delta, _ in self.stream_executor.board.deltas(var_name):
            yield delta

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncGenerator[str, None]: ...
    @overload
    def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: Literal[True]
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]: ...
    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncGenerator[Any, None]:
        """As text_iter; with `return_meta_data` (delta, meta information) of a variable."""
        async for delta, meta in self.stream_executor.board.deltas_async(var_name):
            yield (delta, meta) if return_meta_data else delta

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """A variable's value. Raises KeyError when the program has none of that name, TimeoutError
        after so many seconds."""
        return self.stream_executor.board.value(name, timeout)

    def set_var(self, name: str, value: Any) -> None:
        self.stream_executor.board.put(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What the backend says about a variable: finish_reason, prompt_tokens, cached_tokens …"""
        return self.stream_executor.board.meta(name, timeout)

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stream_executor.board.declares(name)

    @property
    def ret_value(self) -> Any:
        """What the program's function returned."""
        return self._returned

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._returned = value

    @property
    def steps(self) -> list[Step]:
        """What was done so far, in order."""
        return self.stream_executor.steps

    @property
    def all_steps(self) -> list[Step]:
        """Those of branches too."""
        return list(all_steps(self.steps))

    @property
    def usage(self) -> Usage:
        """Tokens of all calls so far, branches included."""
        return total_usage(self.steps)


class Bracket:
    """`begin` is added where the `with` block begins, `end` where it ends without an exception."""

    def __init__(self, state: Any, begin: ir.Expr, end: ir.Expr) -> None:
        self._state, self._begin, self._end = state, begin, end
        self.entered, self.site = False, caller()

    def __repr__(self) -> str:
        return shown("a block for `with`")

    def __enter__(self) -> None:
        self.entered = True
        self._state += self._begin

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self._state += self._end


def role(state: Any, name: str, expr: Any) -> ir.Said | Bracket:
    """A whole message, added at once; without `expr` a block that adds one."""
    if expr is None:
        return Bracket(state, ir.RoleBegin(name), ir.RoleEnd(name))
    state += api.role_expr(name, expr)
    return ir.Said(name)


class Branches:
    """The branches of a fork (SGLang's ProgramStateGroup): a sequence of states."""

    def __init__(self, states: list[ProgramState], source: ProgramState) -> None:
        self._states, self._source = states, source
        self._known = set(source.stream_executor.board.values)

    def __repr__(self) -> str:
        return shown(f"a fork of {len(self)}")

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all branches and bring them home.

        Args:
            mode: "gather_variable": each variable that is new in a branch becomes a list in the
                source, one value a branch that has it. "concate_and_append": what each branch
                added, text and messages, is added to the source, one branch after the other.

        A branch that failed does not fail the join: who reads a variable of it gets its error.
        """
        if mode not in _JOINS:
            raise ExpressionError(
                f"join: mode must be one of {', '.join(_JOINS)}, got {written(mode)}."
            )
        executors = [state.stream_executor for state in self._states]
        for state in self._states:
            state.check_blocks()
        for executor in executors:
            executor.end()
        for executor in executors:
            executor.wait()
        home = self._source.stream_executor
        errors = [one.board.error for one in executors if one.board.error is not None]
        if mode == "gather_variable":
            for name, value in self._gathered().items():
                home.board.put(name, FailedValue(errors[0]) if value is None else value)
        elif errors:
            home.fail(errors[0])
        else:
            for one in executors:
                self._source += said_again(one.steps, one.fork_start_role)

    def _gathered(self) -> dict[str, list[Any] | None]:
        """Values of new variables in the order of the branches; None where a branch failed to
        bring one."""
        boards = [state.stream_executor.board for state in self._states]
        names = [name for board in boards for name in board.declared if name not in self._known]
        gathered: dict[str, list[Any] | None] = {}
        for name in dict.fromkeys(names):
            values = [one.values.get(name, _MISSING) for one in boards if one.declares(name)]
            whole = not any(value is _MISSING or isinstance(value, FailedValue) for value in values)
            gathered[name] = values if whole else None
        return gathered

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `branches[i] += …`, which gives back the state that was there."""
        if state is not self._states[index]:
            raise ExpressionError("a branch cannot be put in another's place; add to it with +=.")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> Branches:
        """Add to every branch: what a callable makes of its number, the item of a list or tuple
        that has one for each, or the same expression."""
        for state, expr in zip(self._states, each(other, len(self._states)), strict=True):
            state += expr
        return self


class Copy:
    """A branch of one as a `with` block."""

    def __init__(self, state: ProgramState) -> None:
        self._branches = state.fork(1)

    def __repr__(self) -> str:
        return shown("a copy of a state")

    def __enter__(self) -> ProgramState:
        return self._branches[0]

    def __exit__(self, *_: object) -> None:
        self._branches.join()


_MISSING: Any = object()


def each(other: Any, size: int) -> Sequence[Any]:
    """What `branches += other` adds to each of `size` branches."""
    if isinstance(other, list | tuple):
        if len(other) != size:
            raise ExpressionError(f"{size} branches take {size} items, got {len(other)}.")
        return other
    return [other(i) for i in range(size)] if callable(other) else [other] * size
