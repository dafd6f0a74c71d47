"""JSON texts of callers, as values: what would be lost or read otherwise by a library is refused by
its place. What the values mean is the business of who reads them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.places import find_place, too_deep
from jserve.types.wording import lone_surrogate

_MOST_DIGITS = 308
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MOST_SHOWN = 20  # characters of a number


@dataclasses.dataclass(frozen=True, slots=True)
class _Unheld:
    """A number that no double is near."""

    text: str
    why: str


def read_json(text: str, what: str, at: str = "#") -> Any:
    """`what` it is, and at which place its own places begin. Raises GrammarError."""
    unheld: list[_Unheld] = []

    def held(number: str, value: int | float | None, why: str) -> Any:
        if value is None:
            unheld.append(_Unheld(number, why))
            return unheld[-1]
        return value

    try:
        value = json.loads(
            text,
            parse_int=lambda number: held(number, *_integer(number)),
            parse_float=lambda number: held(number, *_fraction(number)),
            parse_constant=lambda name: held(name, None, "is no number in JSON"),
            object_pairs_hook=_no_twins,
        )
    except RecursionError:
        raise too_deep(text) from None
    except ValueError as error:
        raise GrammarError(f"the {what} is not JSON: {error}"[:300]) from None
    if unheld:
        _refuse_number(value, at)
    if _SURROGATE.search(text):
        _refuse_surrogates(value, at)
    return value


def _integer(number: str) -> tuple[int | None, str]:
    if len(number.lstrip("-")) > _MOST_DIGITS:
        return None, "is more than a double holds; numbers must be below 1e308"
    return int(number), ""


def _fraction(number: str) -> tuple[float | None, str]:
    value = float(number)
    if value in (float("inf"), -float("inf")):
        return None, "is more than a double holds; numbers must be below 1e308"
    if value == 0 and re.search("[1-9]", re.split("[eE]", number)[0]):
        return None, "is nearer to 0 than a double can be; write 0, or more than 1e-308"
    return value, ""


def _refuse_number(value: Any, at: str) -> None:
    found = find_place(value, lambda one: type(one) is _Unheld, at)
    if found is None:
        return  # another value came under its name
    place, number = found
    text = number.text
    if len(text) > 2 * _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"
    raise GrammarError(f"{place}: {text} {number.why}")


def _refuse_surrogates(value: Any, at: str) -> None:
    found = find_place(value, _has_surrogate, at)
    if found is not None:
        place, one = found
        whose = "its names" if isinstance(one, Mapping) else "it"
        raise GrammarError(
            f"{place}: {whose} must not hold lone surrogates, which are no characters"
        )


def _has_surrogate(value: Any) -> bool:
    match value:
        case str():
            return lone_surrogate(value)
        case dict():
            return any(map(lone_surrogate, value))
    return False


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one name, one would be dropped."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"an object names {json.dumps(twin)[:60]} twice")
    return made
