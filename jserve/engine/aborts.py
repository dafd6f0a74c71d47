"""Aborts by callers, of what is sent and of what is not yet: EngineClient.submit ends that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jserve.engine.client import EngineClient
from jserve.engine.route import Route
from jserve.engine.sendable import check_sendable
from jserve.errors import RequestError
from jserve.types import Abort


def check_abort(rid: Any, abort_all: Any) -> None:
    """Raises RequestError for what no request has as its id, and for another type."""
    for name, value, kind, words in (
        ("rid", rid, str, "a string"),
        ("abort_all", abort_all, bool, "true or false"),
    ):
        check_sendable(name, value)
        if type(value) is not kind:
            raise RequestError(f"{name} must be {words}, got {value!r}.", name)


def abort(client: EngineClient, rid: str, abort_all: bool) -> None:
    """End every request whose id starts with `rid`."""
    mark(client, rid, abort_all)
    client.send(Abort(rid=rid, exact=False, abort_all=abort_all))


def mark(client: EngineClient, rid: str = "", abort_all: bool = True) -> None:
    """As `abort`, but that the engine is not told: it is sent no more of those requests."""
    for route in client.routes.copy().values():
        if abort_all or route.rid.startswith(rid):
            route.aborted = True


def all_aborted(claims: Iterable[Route]) -> bool:
    return all(route.aborted for route in claims)
