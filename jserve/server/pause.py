"""Pausing and continuing the engine over HTTP. What a pause does is the scheduler's business."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from jserve.errors import JserveError
from jserve.server.exchange import Serving, read_body
from jserve.server.protocol import Body, decode
from jserve.server.replies import json_response
from jserve.types import ControlReply


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    torch_empty_cache: bool = True  # accepted: there is no such cache


class PauseRoutes:
    """Bodies may be empty. An answer means that it is done."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def pause(self, request: Request) -> Response:
        body = decode(await read_body(request) or b"{}", PauseBody)
        reply = await self._serving.engine.control("pause_generation", mode=body.mode)
        return _done(reply, "Generation paused successfully.")

    async def resume(self, request: Request) -> Response:
        decode(await read_body(request) or b"{}", ContinueBody)
        reply = await self._serving.engine.control("continue_generation")
        return _done(reply, "Generation continued successfully.")


def _done(reply: ControlReply, message: str) -> Response:
    if not reply.ok:
        raise JserveError(reply.message)
    return json_response({"message": message, "status": "ok"})
