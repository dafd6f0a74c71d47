"""Places in JSON texts, as JSON pointers. What is too deep to be read is refused by that place."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jserve.grammar.backend import GrammarError

_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]', re.DOTALL)
_MOST_SHOWN = 120  # characters of a place


def escape(key: str) -> str:
    """A key as part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


@contextlib.contextmanager
def placed(at: str) -> Iterator[None]:
    """Within, a GrammarError says that it is there."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{at}: {error}") from None


def too_deep(text: str) -> GrammarError:
    """`text` is a JSON schema, or a tag that holds some."""
    levels = max(map(len, _paths(text)), default=0)
    path = next((path for path in _paths(text) if len(path) == levels), [])
    return _refusal(levels, path[:-1])


def value_too_deep(value: Any) -> GrammarError:
    """As `too_deep`, for one that is no text yet."""
    layer, last, levels = [_Place(value)], _Place(value), 0
    while layer := [place for place in layer if isinstance(place.value, Mapping | list | tuple)]:
        last, levels = layer[0], levels + 1
        inner = (one for place in layer for one in place.inner())
        layer = list({id(place.value): place for place in inner}.values())  # it may be shared
    return _refusal(levels, last.path())


def find_place(value: Any, wrong: Callable[[Any], bool], at: str) -> tuple[str, Any] | None:
    """The first value that is wrong, itself or one within, in the order of its text, and its place,
    where `at` is that of the whole."""
    waiting = [_Place(value)]
    while waiting:
        place = waiting.pop()
        if wrong(place.value):
            path = (escape(str(part)) for part in place.path())
            return _shown("/".join((at, *path))), place.value
        if isinstance(place.value, dict | list):
            waiting += place.inner()[::-1]
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    value: Any
    around: _Place | None = None
    part: str | int = ""

    def inner(self) -> list[_Place]:
        value = self.value
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [_Place(one, self, part) for part, one in parts]

    def path(self) -> list[str | int]:
        path: list[str | int] = []
        place = self
        while place.around is not None:
            path.append(place.part)
            place = place.around
        return path[::-1]


def _refusal(levels: int, path: Sequence[str | int]) -> GrammarError:
    place = _shown("/".join(("#", *(escape(str(part)) for part in path))))
    return GrammarError(
        f"it is nested too deeply: {levels} levels at {place}; put inner parts under $defs, and "
        "refer to them by $ref"
    )


def _shown(place: str) -> str:
    if len(place) > _MOST_SHOWN:
        return f"{place[: _MOST_SHOWN // 2]}…{place[-_MOST_SHOWN // 2 :]}"
    return place


def _paths(text: str) -> Iterator[list[str | int]]:
    """At each object or list that opens, its place: keys and numbers of those around it, and a last
    part for its own. The same list, which changes."""
    path: list[str | int] = []
    name = ""
    for token in _TOKENS.findall(text):
        if token in "{[":
            path.append("" if token == "{" else 0)
            yield path
        elif token in "}]":
            del path[-1:]
        elif token == "," and path and isinstance(at := path[-1], int):
            path[-1] = at + 1
        elif token == ":" and path:
            path[-1] = name
        elif token != ",":
            name = token[1:-1]
