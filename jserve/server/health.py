"""Whether the engine serves: /health, /ready and /health_generate.

200 when it answers, in a pause too. 503 while it starts, when it has ended, and when no answer
comes within `TIMEOUT`: one that hangs lives, and serves nobody.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import Response

from jserve.errors import EngineDeadError, JserveError, QueueFullError, TimedOutError
from jserve.server.exchange import Serving, while_connected
from jserve.server.outputs import finished
from jserve.types import GenerateRequest, SamplingParams

TIMEOUT = 20.0  # seconds
_BUSY = ("num_running_reqs", "num_queue_reqs")


class HealthRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def health(self, request: Request) -> Response:
        """As `health_generate`, but among other requests a turn of the engine's loop is enough."""
        return await self._status(request, among_others=False)

    async def health_generate(self, request: Request) -> Response:
        """A request of one token. In a pause it would wait for the end of that; then an answer of
        the engine is enough."""
        return await self._status(request, among_others=True)

    async def _status(self, request: Request, among_others: bool) -> Response:
        if self._serving.loaded is None or not self._serving.loaded.healthy:
            return Response(status_code=503)
        work = asyncio.wait_for(self._answered(among_others), TIMEOUT)
        try:
            await while_connected(request.receive, work)
        except (QueueFullError, TimedOutError):
            return Response(status_code=200)  # busy, so alive
        except (JserveError, TimeoutError):
            return Response(status_code=503)
        return Response(status_code=200)

    async def _answered(self, among_others: bool) -> None:
        """By the loop between two steps, and with a token."""
        try:
            state = (await self._serving.engine.control("server_info")).payload
        except TimedOutError as error:
            raise EngineDeadError(str(error)) from None  # as good as dead, for now
        if state.get("paused") or (any(map(state.get, _BUSY)) and not among_others):
            return
        probe = GenerateRequest(
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            input_ids=[0],
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            log_metrics=False,
            no_logs=True,
        )
        await finished(self._serving.outputs([probe]))
