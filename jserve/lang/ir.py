"""Expressions: what a program line adds to its state, as data.

Owns the kinds of expression and how they are put in a row with `+`; what they do is the executor's
(on a model) and the tracer's (without one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

from jserve.lang.choices import ChoicesMethod
from jserve.lang.errors import ExpressionError
from jserve.lang.sampling import Sampling
from jserve.lang.shown import check_text, shown
from jserve.lang.site import Site, caller
from jserve.types.wording import written


class Expr:
    """Something that `s += …` takes. `a + b` is both, one after the other; either may be text."""

    __slots__ = ()

    def __add__(self, other: Any) -> ExprList:
        return ExprList((*parts(self), *parts(as_expr(other))))

    def __radd__(self, other: Any) -> ExprList:
        return ExprList((*parts(as_expr(other)), *parts(self)))

    def __str__(self) -> str:
        """Refused, as in an f-string: text of it would be Python's, not the model's."""
        raise ExpressionError(
            f"{in_words(self)} has no text before it is run: put it beside text with +, as in "
            '"a " + gen("x") + " b", not into an f-string, format() or str().'
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __repr__(self) -> str:
        """For debuggers; refused where it would become a part of the prompt."""
        return shown(in_words(self))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Text(Expr):
    value: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Gen(Expr):
    """Text of the model, kept as variable `name` when it has one."""

    name: str | None
    sampling: Sampling
    site: Site


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Select(Expr):
    """The likeliest of `choices` by `method`, kept as variable `name`."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesMethod
    site: Site


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RoleBegin(Expr):
    role: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RoleEnd(Expr):
    role: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ScopeBegin(Expr):
    """From here to its end, text is variable `name` too."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ScopeEnd(Expr):
    name: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Commit(Expr):
    """The text so far goes into the backend's cache, because `num_branches` will share it."""

    num_branches: int


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SeparateReasoning(Expr):
    """`expr`, its variables split into reasoning and answer."""

    expr: Expr
    model_type: str
    site: Site


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ExprList(Expr):
    items: tuple[Expr, ...]


class Unknown(Expr):
    """A value that is known only when the program runs. Everything that would look into it raises
    TypeError, so that a trace ends where a program depends on it."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"{in_words(self)} has no value while the program is traced")

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __int__ = __float__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __str__(self) -> str:
        raise TypeError(
            f"{in_words(self)} has no value while the program is traced: put it beside text with "
            "+, not into an f-string, format() or str()"
        )

    def __eq__(self, other: object) -> bool:
        return self._refuse()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{in_words(self)} has no value while the program is traced")

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Argument(Unknown):
    """An argument of the program."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Variable(Unknown):
    """What the program has generated, or will have."""

    name: str


class Said:
    """What `s.user(x)` gives back: the message is added already, so nothing takes it again."""

    __slots__ = ("_role",)

    def __init__(self, role: str) -> None:
        self._role = role

    def __add__(self, other: Expr | str) -> NoReturn:
        self.refuse()

    def __radd__(self, other: Expr | str) -> NoReturn:
        self.refuse()

    def __str__(self) -> str:
        return self.refuse()

    def __format__(self, spec: str) -> str:
        return self.refuse()

    def __enter__(self) -> NoReturn:
        self.refuse(f" Without a text a block is with s.{self._role}():")

    def __exit__(self, *_: object) -> None:
        """Never called: no block is entered."""

    def __repr__(self) -> str:
        return shown(f"s.{self._role}(…)")

    def refuse(self, more: str = "") -> NoReturn:
        role = self._role
        raise ExpressionError(
            f"s.{role}(…) has added its message already: let it stand alone, or make an "
            f"expression with sgl.{role}(…), as in s += sgl.{role}(…).{more}"
        )


#: What `s +=` takes.
Addable: TypeAlias = Expr | str | Sequence[Any]


def as_expr(value: Any) -> Expr:
    """Text, or an expression as it is. Raises ExpressionError."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        check_text(value)
        return Text(value)
    if isinstance(value, list | tuple):
        return ExprList(tuple(part for item in value for part in parts(as_expr(item))))
    if isinstance(value, Said):
        value.refuse()
    raise ExpressionError(f"s += takes text or an expression such as gen(), got {written(value)}.")


def parts(expr: Expr) -> tuple[Expr, ...]:
    return expr.items if isinstance(expr, ExprList) else (expr,)


def names(expr: Expr) -> Iterator[str]:
    """Variables that executing `expr` will set."""
    for part in parts(expr):
        if isinstance(part, Gen | Select | ScopeEnd) and part.name is not None:
            yield part.name
        elif isinstance(part, SeparateReasoning):
            for name in names(part.expr):
                yield from (name, reasoning_name(name))


def reasoning_name(name: str) -> str:
    """The variable beside `name` that holds how the model came to it."""
    return f"{name}_reasoning_content"


def described(expr: Expr, site: Site) -> tuple[Site, str]:
    """The line that an expression comes from, and what it is in words; `site` is where it was
    added."""
    if isinstance(expr, Gen):
        return expr.site, f"gen({expr.name!r})" if expr.name else "gen()"
    if isinstance(expr, Select):
        return expr.site, f"select({expr.name!r})" if expr.name else "select()"
    if isinstance(expr, SeparateReasoning):
        return expr.site, "separate_reasoning()"
    if isinstance(expr, RoleBegin | RoleEnd):
        return site, f"the role {expr.role}"
    return site, "fork()" if isinstance(expr, Commit) else "s +="


def in_words(expr: Expr) -> str:
    """What an expression is, alone."""
    if isinstance(expr, Argument | Variable):
        return f"the {type(expr).__name__.lower()} {expr.name}"
    if isinstance(expr, Text):
        return f"the text {expr.value!r}"
    plain = isinstance(expr, ExprList | ScopeBegin | ScopeEnd)
    return "an expression" if plain else described(expr, caller())[1]
