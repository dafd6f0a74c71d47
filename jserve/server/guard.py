"""The bearer key, in front of every route of a server that has one.

Knows paths and one header; nothing of bodies, routes or the engine.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jserve.errors import AuthError
from jserve.server.replies import error_response

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")  # need no key


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._lets_through(scope):
            error = AuthError("Authorization must be a bearer token with the server's API key.")
            response = error_response(error, scope["path"])
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _lets_through(self, scope: Scope) -> bool:
        if scope["path"].startswith(_OPEN_PREFIXES):
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
