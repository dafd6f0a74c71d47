"""A decorated function as a program: run once, in a batch, asynchronously, or traced.

Owns arguments and the life of one run; batches are batch.py's, traces tracing.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

from jserve.lang import batch, tracing
from jserve.lang.ahead import Ahead
from jserve.lang.backends.base import Backend, Prompt, Seen
from jserve.lang.board import Board
from jserve.lang.control import find_backend
from jserve.lang.errors import ExpressionError
from jserve.lang.executor import Mode, StreamExecutor
from jserve.lang.sampling import FIELDS, Sampling, SamplingArguments
from jserve.lang.settings import global_config
from jserve.lang.shown import shown
from jserve.lang.site import caller
from jserve.lang.state import ProgramState
from jserve.lang.transcript import Transcript
from jserve.types.wording import nearest_name, written

#: Of a batch: arguments of each run, all by name or all by place.
Items: TypeAlias = Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]
#: A cached prefix is worth its call from so many characters on.
MIN_PREFIX = 64


class SglFunction:
    """A program: `func(s, …)` adds to its state `s`. Keyword arguments of the run methods that are
    sampling parameters (max_new_tokens, temperature, stop …) are the base of every gen."""

    def __init__(
        self,
        func: Callable[..., Any],
        bound: Mapping[str, Any] | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self.func, self.num_api_spec_tokens = func, num_api_spec_tokens
        self.bind_arguments = dict(bound or {})
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].name != "s":
            raise ExpressionError(f"the first argument of {func.__name__} must be called s.")
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
            raise ExpressionError(f"{func.__name__} must be a plain function: no async, no yield.")
        for one in parameters[1:]:
            if one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY):
                why = f"{one} cannot be given by name"
                raise ExpressionError(f"{func.__name__}: {why}; programs take named arguments.")
        self._parameters = parameters[1:]
        named = [one for one in self._parameters if one.kind is not one.VAR_KEYWORD]
        self.arg_names = [parameter.name for parameter in named]
        self.__doc__, self.__name__ = func.__doc__, func.__name__

    def __repr__(self) -> str:
        return shown(f"the program {self.__name__}")

    @property
    def required(self) -> list[str]:
        """Arguments that a run must give."""
        return [
            name for name in tracing.dummies(self._parameters) if name not in self.bind_arguments
        ]

    def bind(self, **arguments: Any) -> SglFunction:
        """The program with arguments that are fixed, whatever a run says, which is warned of."""
        if unknown := arguments.keys() - set(self.arg_names):
            raise self._no_argument(min(unknown))
        return SglFunction(self.func, self.bind_arguments | arguments)

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run it to its end; with `stream` return at once, the state is then read as it grows.

        Args:
            backend: None: the default one. An Engine or a Runtime will do.
            use_thread: False: every expression is done where the program adds it.
            kwargs: arguments of the program, and sampling parameters.

        Raises what the function raises; a failed call raises where its value is read.
        """
        sampling, arguments = self._split(args, kwargs)
        mode = Mode(stream, use_thread or stream, detached=stream)
        state = self._state(find_backend(backend), sampling, mode)
        if stream:
            thread = threading.Thread(
                target=self._run_detached, args=(state, arguments), name="jserve-program"
            )
            thread.daemon = True
            thread.start()
            return state
        self._run(state, arguments)
        return state

    @overload
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        **sampling: Unpack[SamplingArguments],
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        **sampling: Unpack[SamplingArguments],
    ) -> batch.States: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool,
        **sampling: Unpack[SamplingArguments],
    ) -> list[ProgramState] | batch.States: ...
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> list[ProgramState] | batch.States:
        """Run it for every item, dicts or tuples of arguments: a list of states in their order.

        One whose function raises does not end the others: its state's error() says so, and reading
        what it has not got raises. The prefix that all share is computed once before.

        Args:
            num_threads: programs at a time; auto: 96, or 16 a processor if that is more.
            generator_style: a generator of the states instead, fed 200 at a time.
            sampling: sampling parameters.
        """
        if wrong := sampling.keys() - set(FIELDS):
            raise _no_name(f"run_batch has no argument {min(wrong)}", min(wrong), FIELDS)
        if not isinstance(batch_kwargs, Iterable):
            rule = "run_batch takes a list of dicts or tuples"
            raise ExpressionError(f"{rule}, got {written(batch_kwargs)}.")
        calls = [self._item(item) for item in batch_kwargs]
        base, found = Sampling(**sampling), find_backend(backend)

        num = batch.threads(num_threads, len(calls))

        def states() -> batch.States:
            shared = len(calls) > 1 and global_config.enable_precache_with_tracing
            seen = self.cache(found) if shared else Seen()

            def make() -> ProgramState:
                state = self._state(found, base, Mode())
                state.stream_executor.execution.seen = seen
                return state

            def drive(state: ProgramState, arguments: Mapping[str, Any]) -> None:
                self._run(state, arguments, quiet=True)

            window = batch.CHUNK if generator_style else len(calls)
            running = batch.run(calls, make, drive, num, window)
            yield from batch.shown(running, len(calls)) if progress_bar else running

        return states() if generator_style else list(states())

    async def run_async(self, *args: Any, backend: Any = None, **kwargs: Any) -> ProgramState:
        """As `run`, beside the running event loop. Cancelling it cancels the program."""
        sampling, arguments = self._split(args, kwargs)
        state = self._state(find_backend(backend), sampling, Mode())
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                self._run(state, arguments)
            except Exception as error:  # told to who awaits
                failed.append(error)
            with contextlib.suppress(RuntimeError):  # the loop was closed under its program
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, name="jserve-program", daemon=True).start()
        try:
            await done.wait()
        except asyncio.CancelledError:
            state.cancel()
            raise
        if failed:
            raise failed[0]
        return state

    def trace(self, *, backend: Any = None, **kwargs: Any) -> tracing.TracerProgramState:
        """What the program would do with arguments that are not known yet, but for those given."""
        given = backend or global_config.default_backend
        found = None if given is None else find_backend(given)
        return tracing.trace(self.func, self._dummies(kwargs), found)

    def cache(self, backend: Any = None) -> Seen:
        """Bring the text that every run begins with into the backend's cache, if it is long; how
        much that is."""
        found = find_backend(backend)
        prefix = tracing.trace(self.func, self._dummies({}), found, prefix_only=True).prefix
        if len(prefix) <= MIN_PREFIX:
            return Seen()
        done = found.loop.call(found.commit(Prompt(prefix)))
        return Seen(len(prefix), done.seen_tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """run; while another program is traced, a part of its trace."""
        tracer = tracing.current()
        if tracer is None:
            return self.run(*args, **kwargs)
        _, arguments = self._split(args, kwargs)
        return tracer.call(self.func, arguments)

    def _split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sampling, dict[str, Any]]:
        """Sampling parameters, and arguments of the program. A program's own argument wins over a
        sampling parameter of the same name."""
        own = set(self.arg_names)
        sampling = {k: v for k, v in kwargs.items() if k in FIELDS and k not in own}
        rest = {k: v for k, v in kwargs.items() if k not in sampling}
        return Sampling(**sampling), self._arguments(args, rest)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.arg_names):
            count = len(self.arg_names)
            takes = f"{count} argument" if count == 1 else f"{count} arguments"
            hint = _OWN_STATE if isinstance(args[0], _STATES) else "."
            raise ExpressionError(f"{self.__name__} takes {takes}, got {len(args)}{hint}")
        arguments = dict(zip(self.arg_names, args, strict=False))
        self._check_names(kwargs)
        if twice := arguments.keys() & kwargs.keys():
            raise ExpressionError(f"{self.__name__}: {min(twice)} is given twice.")
        given = {**arguments, **kwargs}
        for name in sorted(given.keys() & self.bind_arguments.keys()):
            site, value = caller(), self.bind_arguments[name]
            message = (
                f"{self.__name__}: {name} is bound to {written(value)}, what is given goes unheard"
            )
            warnings.warn_explicit(message, UserWarning, site.file, site.line)
        return given | self.bind_arguments

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Raises ExpressionError for arguments that the function does not take."""
        variadic = any(one.kind is one.VAR_KEYWORD for one in self._parameters)
        unknown = given.keys() - set(self.arg_names)
        if unknown and not variadic:
            raise self._no_argument(min(unknown))

    def _no_argument(self, name: str) -> ExpressionError:
        what = f"{self.__name__} has no argument {name}"
        if name in FIELDS:
            return ExpressionError(f"{what}; a sampling parameter goes to run or run_batch itself.")
        return _no_name(what, name, (*self.arg_names, *FIELDS))

    def _item(self, item: Any) -> dict[str, Any]:
        """One item of a batch as arguments."""
        if isinstance(item, Mapping):
            return self._arguments((), item)
        if not isinstance(item, list | tuple):
            rule = "an item of a batch must be a dict or a tuple"
            raise ExpressionError(f"{rule}, got {written(item)}.")
        free = [name for name in self.arg_names if name not in self.bind_arguments]
        must = {one.name for one in self._parameters if one.default is one.empty}
        least = sum(name in must for name in free)
        if not least <= len(item) <= len(free):
            count = len(free) if least == len(free) else f"{least} to {len(free)}"
            raise ExpressionError(
                f"{self.__name__} takes {count} arguments ({', '.join(free)}), "
                f"but an item of the batch has {len(item)}."
            )
        return self._arguments((), dict(zip(free, item, strict=False)))

    def _dummies(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(given)
        return {**tracing.dummies(self._parameters), **given, **self.bind_arguments}

    def _state(self, backend: Backend, sampling: Sampling, mode: Mode) -> ProgramState:
        board = Board(mode.stream, open_names=mode.detached)
        executor = StreamExecutor(backend, sampling, mode, board, Transcript(board))
        executor.execution.ahead = Ahead(self.num_api_spec_tokens)
        return ProgramState(executor)

    def _run(self, state: ProgramState, arguments: Mapping[str, Any], quiet: bool = False) -> None:
        """`quiet`: what the function raises is the state's error, not raised."""
        executor = state.stream_executor
        executor.board.adopt()
        failure: Exception | None = None
        try:
            try:
                state.ret_value = self.func(state, **arguments)
                state.check_blocks()
            except Exception as error:  # the user's code may raise anything
                failure = error
                executor.fail(error)
            executor.end()
            executor.wait()
        except BaseException:  # an interrupt, here or in the function
            executor.cancel()
            executor.end()
            raise
        if failure is not None and not quiet:
            raise failure

    def _run_detached(self, state: ProgramState, arguments: Mapping[str, Any]) -> None:
        self._run(state, arguments, quiet=True)


_STATES = (ProgramState, tracing.TracerProgramState)
_OWN_STATE = (
    ": it has a state of its own, so leave s out; what is to add to the caller's is a plain "
    "function, without @function."
)


def _no_name(what: str, name: str, known: Collection[str]) -> ExpressionError:
    near = nearest_name(name, known)
    return ExpressionError(f"{what}; did you mean {near}?" if near else f"{what}.")


@overload
def function(func: Callable[..., Any]) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Make a program of a function whose first argument is called `s`.

    num_api_spec_tokens: ask for so many tokens where a gen has stops, and read later gens from
        what the model wrote behind them, as long as it wrote the program's text in between. Saves
        calls of an API that bills each; not in a program that streams, not for chat models.
    """
    if func is None:
        return lambda given: SglFunction(given, None, num_api_spec_tokens)
    return SglFunction(func, None, num_api_spec_tokens)
