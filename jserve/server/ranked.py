"""Requests that name the data-parallel rank that must serve them: `routed_dp_rank` in the body, its
old name `data_parallel_rank`, or the header x-data-parallel-rank, which wins.

Around the routes of a server that has several ranks; others know none of this. Refuses to know
which ranks there are (engine/placement.py) and what else a body holds.
"""

from __future__ import annotations

import json
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from jserve.engine.requests import one_rank
from jserve.errors import RequestError
from jserve.server.exchange import made_of_body
from jserve.server.headers import RANK, rank_of
from jserve.server.query import Handler

_NAME, _OLD_NAME = "routed_dp_rank", "data_parallel_rank"


def with_rank(handler: Handler, pool: Executor) -> Handler:
    """`handler`, for which exchange.origin finds the rank in the request's scope. `pool` is for
    large bodies."""

    async def ranked(request: Request) -> Response:
        rank, body = await made_of_body(request, _taken_out, pool)
        named = request.headers.get(RANK)
        plain = [one for one in request.scope["headers"] if one[0] != b"content-encoding"]
        scope = {
            **request.scope,
            _NAME: rank if named is None else rank_of(named),
            "headers": plain,  # the body is unpacked now
        }
        return await handler(Request(scope, _replay(body, request.receive)))

    return ranked


def _taken_out(body: bytes) -> tuple[int | None, bytes]:
    """The rank that the body names, and the body without it. One that is no JSON object is left
    for the route to refuse."""
    # JSON may write any letter of a name by its number.
    if not any(part in body for part in (_NAME.encode(), _OLD_NAME.encode(), rb"\u")):
        return None, body
    try:
        fields = json.loads(body)
    except (RecursionError, ValueError):
        return None, body
    if not isinstance(fields, dict) or fields.keys().isdisjoint((_NAME, _OLD_NAME)):
        return None, body
    given = {name: fields.pop(name, None) for name in (_NAME, _OLD_NAME)}
    for name, value in given.items():
        _check_type(name, value)
    return one_rank(given[_NAME], given[_OLD_NAME]), json.dumps(fields).encode()


def _check_type(name: str, value: Any) -> None:
    if value is not None and not (type(value) is int and abs(value) < 2**31):
        raise RequestError(f"{name} must be an integer of 32 bits, got {json.dumps(value)}.", name)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` once more from the beginning, with this body."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received
