"""HTTP exchanges, counted by endpoint: those that are refused have no other metric.

ASGI middleware of a server with metrics. Knows paths, methods and statuses; no request or answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jserve.metrics import Metrics
from jserve.server.exchange import Serving

#: Clients may send any path and any method, and every label is a series for ever.
_OTHER = "other"
_METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))


class HttpMetrics:
    """Counts as soon as the engine, which has the metrics, is ready."""

    def __init__(self, app: ASGIApp, serving: Serving, routes: Sequence[BaseRoute]) -> None:
        self._app, self._serving = app, serving
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._serving.loaded
        if scope["type"] != "http" or engine is None:
            await self._app(scope, receive, send)
        else:
            await self._counted(engine.metrics, scope, receive, send)

    async def _counted(self, metrics: Metrics, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoint(scope)
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        status = 500  # of what fails before it has an answer

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        metrics.count(f"http_requests_total/{endpoint} {method}")
        metrics.count(f"http_requests_active/{endpoint} {method}")
        try:
            await self._app(scope, receive, noted)
        finally:
            metrics.count(f"http_requests_active/{endpoint} {method}", -1)
            metrics.count(f"http_responses_total/{endpoint} {status} {method}")

    def _endpoint(self, scope: Scope) -> str:
        """The path as the route spells it."""
        for route in self._routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                return route.path
        return _OTHER
