"""What is wrong with a body that is no JSON, or whose fields have the wrong name or type, in words
that name the field."""

from __future__ import annotations

import re

import msgspec

from jserve.errors import RequestError


def json_error(raw: bytes, error: Exception) -> RequestError:
    """`error` is what reading `raw` raised."""
    if isinstance(error, RecursionError):
        return RequestError("The body is nested too deeply.")
    number = re.search(rb'"([^"\\]{1,64})"\s*:\s*[-[\s]*(NaN|Infinity)', raw)
    if number:
        name, value = (group.decode(errors="replace") for group in number.groups())
        return RequestError(f"{name} must be a finite number, got {value}.", name)
    return RequestError(f"The body is not valid JSON: {error}.")


def field_error(error: msgspec.ValidationError, at: str) -> RequestError:
    """msgspec's message with the field in front; `at` is the path of the object."""
    problem, _, path = str(error).partition(" - at ")
    path = _join(at, path.rpartition("`$")[2].rstrip("`").lstrip("."))
    if match := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        path = _join(path, match[2])
        what = "is not a known field" if match[1] == "contains unknown" else "is required"
        return RequestError(f"{path} {what}.", path)
    return RequestError(f"{path or 'body'}: {problem.replace('`', '')}.", path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name
