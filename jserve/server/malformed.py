"""What is wrong with a body that is no JSON, or whose fields have the wrong name or type, in words
that name the field and, where there are few, what it may be.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import msgspec.inspect

from jserve.errors import RequestError
from jserve.types.wording import lone_surrogate, nearest_name, plain_types

_NEAR = 256  # bytes between the name of a field and its number, at most


def json_error(raw: bytes, error: Exception) -> RequestError:
    """`error` is what reading `raw` raised."""
    if isinstance(error, RecursionError):
        return RequestError("The body is nested too deeply.")
    if number := _no_number(raw, error):
        name, value = number
        return RequestError(f"{name} must be a finite number, got {value}.", name)
    if re.search(rb"\\u[dD][89a-fA-F]", raw) and (path := _lone_surrogate(raw)) is not None:
        rule = "must not hold lone surrogates: they are no characters."
        return RequestError(f"{path or 'body'} {rule}", path or None)
    return RequestError(f"The body is not valid JSON: {error}.")


def field_error(
    error: msgspec.ValidationError, at: str, body: type[msgspec.Struct]
) -> RequestError:
    """msgspec's message with the field in front; `at` is the path of the object, which is to be a
    `body`.
    """
    problem, _, place = str(error).partition(" - at ")
    inside = place.rpartition("`$")[2].rstrip("`").lstrip(".")
    path = _join(at, inside)
    if match := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        path = _join(path, match[2])
        known = body.__struct_fields__
        near = None if match[1] == "missing required" else nearest_name(match[2], known)
        what = "is required" if match[1] == "missing required" else "is not a known field"
        return RequestError(f"{path} {what}{f'; did you mean {near}?' if near else '.'}", path)
    if problem.startswith("Invalid enum value"):
        names = re.sub(r"\[[^\]]*\]", "", inside)
        accepted = _accepted(msgspec.inspect.type_info(body), names)
        got = problem.removeprefix("Invalid enum value ")
        return RequestError(f"{path} must be one of {', '.join(accepted)}, got {got}.", path)
    return RequestError(f"{path or 'body'}: {plain_types(problem)}.", path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _accepted(kind: msgspec.inspect.Type, path: str) -> list[str]:
    """The values that the field at `path`, names only, may have; none where it is no choice."""
    name, _, rest = path.partition(".")
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return [str(value) for value in values]
        case msgspec.inspect.UnionType(types=types):
            return [value for one in types for value in _accepted(one, path)]
        case msgspec.inspect.ListType(item_type=item):
            return _accepted(item, path)
        case msgspec.inspect.DictType(value_type=item):
            return _accepted(item, path)
        case msgspec.inspect.StructType(fields=fields):
            return [v for one in fields if one.name == name for v in _accepted(one.type, rest)]
    return []


def _no_number(raw: bytes, error: Exception) -> tuple[str, str] | None:
    """The field that has NaN or Infinity where reading ended, and which of them."""
    place = re.search(r"\(byte (\d+)\)", str(error))
    end = 0 if place is None else int(place[1])
    value = re.match(rb"NaN|Infinity", raw[end : end + 8])
    # NOTE: a body may be long and made to fail, so no regex looks at the whole of it.
    name = re.search(rb'"([^"\\]{1,64})"\s*:[-[\s]*\Z', raw[max(0, end - _NEAR) : end])
    return name and value and (name[1].decode(errors="replace"), value[0].decode())


def _lone_surrogate(raw: bytes) -> str | None:
    """The path of the first text with one; "": of a name."""
    try:
        place = _place_of_surrogate(json.loads(raw))
    except (RecursionError, ValueError):
        return None
    if place is None:
        return None
    return functools.reduce(_join, (f"[{one}]" if type(one) is int else str(one) for one in place))


def _place_of_surrogate(value: Any) -> list[str | int] | None:
    """The names and indexes that lead to it; [""]: it is here."""
    items: Iterable[tuple[str | int, Any]] = ()
    match value:
        case str() if lone_surrogate(value):
            return [""]
        case list():
            items = enumerate(value)
        case dict():
            if any(map(lone_surrogate, value)):
                return [""]
            items = value.items()
    for key, one in items:
        if (rest := _place_of_surrogate(one)) is not None:
            return [key, *rest]
    return None
