"""What is wrong with a body that is no JSON, or whose fields have the wrong name or type, in words
that name the field."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from jserve.errors import RequestError
from jserve.types.wording import nearest_name, plain_types


def json_error(raw: bytes, error: Exception) -> RequestError:
    """`error` is what reading `raw` raised."""
    if isinstance(error, RecursionError):
        return RequestError("The body is nested too deeply.")
    number = re.search(rb'"([^"\\]{1,64})"\s*:\s*[-[\s]*(NaN|Infinity)', raw)
    if number:
        name, value = (group.decode(errors="replace") for group in number.groups())
        return RequestError(f"{name} must be a finite number, got {value}.", name)
    return RequestError(f"The body is not valid JSON: {error}.")


def field_error(error: msgspec.ValidationError, at: str, known: Collection[str]) -> RequestError:
    """msgspec's message with the field in front; `at` is the path of the object, `known` are its
    fields.
    """
    problem, _, path = str(error).partition(" - at ")
    path = _join(at, path.rpartition("`$")[2].rstrip("`").lstrip("."))
    if match := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        path = _join(path, match[2])
        near = None if match[1] == "missing required" else nearest_name(match[2], known)
        what = "is required" if match[1] == "missing required" else "is not a known field"
        return RequestError(f"{path} {what}{f'; did you mean {near}?' if near else '.'}", path)
    return RequestError(f"{path or 'body'}: {plain_types(problem)}.", path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name
