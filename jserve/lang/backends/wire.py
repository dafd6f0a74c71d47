"""What goes to a server: its address, and bodies as JSON. What can be neither is named, and so is
the server that does not answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping
from typing import Any

import httpx

from jserve.errors import RequestError
from jserve.lang.errors import BackendError, ExpressionError

JSON = {"Content-Type": "application/json"}


def server_url(name: str, given: Any) -> str:
    """An address without a slash at its end. Raises ExpressionError naming the argument."""
    try:
        url = httpx.URL(given)
        good = url.scheme in ("http", "https") and bool(url.host)
    except (TypeError, httpx.InvalidURL):
        good = False
    if not good:
        raise ExpressionError(
            f"{name} must be a server's address such as http://127.0.0.1:30000, got {given!r}."
        )
    return str(given).rstrip("/")


@contextlib.contextmanager
def told(what: str, url: str) -> Generator[None, None, None]:
    """Failures of the network as BackendErrors."""
    try:
        yield
    except httpx.HTTPError as error:
        raise BackendError(f"{what} at {url}: {str(error) or type(error).__name__}") from error


def encoded(body: Any) -> bytes:
    """Raises RequestError for a field that JSON cannot say: a number that is none, half a
    character, an object of Python's."""
    try:
        return _encoded(body)
    except (TypeError, ValueError, RecursionError) as error:
        path = _culprit(body)
        raise RequestError(f"{path} cannot be sent: {error}.", path) from None


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _culprit(fields: Mapping[str, Any]) -> str:
    """The innermost field that cannot be written alone."""
    for name, value in fields.items():
        try:
            _encoded(value)
        except (TypeError, ValueError, RecursionError):
            return _culprit(value) if name == "sampling_params" else name
    return "the body"
