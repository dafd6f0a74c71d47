"""/configure_logging: what --log-requests does, changed while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from jserve.server import unsupported
from jserve.server.exchange import Serving, read_body
from jserve.server.protocol import Body, Int, decode
from jserve.server.replies import json_response


class LoggingBody(Body):
    """A field that is absent leaves things as they are."""

    unsupported: ClassVar[Mapping[str, Any]] = unsupported.LOGGING

    log_requests: bool | None = None
    log_requests_level: Int | None = None


class LogRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def configuration(self, request: Request) -> Response:
        return json_response(self._serving.engine.request_log.configuration)

    async def configure(self, request: Request) -> Response:
        """Answers with what holds from now on."""
        body = decode(await read_body(request), LoggingBody)
        log = self._serving.engine.request_log
        log.configure(body.log_requests, body.log_requests_level)
        return json_response(log.configuration)
