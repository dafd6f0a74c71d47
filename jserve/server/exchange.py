"""One HTTP exchange: a body within its limit, the engine while the client is there, the stream.

What every route shares. Knows nothing of the fields of any request or answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jserve.config import Config
from jserve.engine.engine import Engine
from jserve.errors import EngineDeadError, TooLargeError
from jserve.metrics.timing import Timing
from jserve.server.headers import RARE, check_rare, check_type, unpacked
from jserve.server.outputs import Outputs
from jserve.server.query import check_query
from jserve.server.replies import error_event
from jserve.types import GenerateRequest

MAX_BODY_BYTES = 64 << 20
LARGE_BODY = 1 << 15  # bytes; what more of them need would stop the event loop for milliseconds
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Lines = AsyncGenerator[bytes, None]
_T = TypeVar("_T")


@dataclasses.dataclass(slots=True)
class Serving:
    """What the routes work on. `engine` raises until it is `loaded`; `pool` is for large bodies."""

    config: Config
    loaded: Engine | None = None
    pool: Executor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(4, "large-body"))

    @property
    def engine(self) -> Engine:
        if self.loaded is None:
            raise EngineDeadError("The server is starting.")
        return self.loaded

    @property
    def model_name(self) -> str:
        return self.config.model.served_model_name or self.config.model.model_path

    def outputs(self, requests: Sequence[GenerateRequest]) -> Outputs:
        """Outputs of all requests as they come; `index` counts the sequences of all of them."""
        engine, (first, *others) = self.engine, requests
        return engine.generate_batch(requests) if others else engine.generate_stream(first)


def origin(request: Request) -> dict[str, Any]:
    """Fields of the GenerateRequests that this exchange, which begins, will ask for."""
    if not RARE.isdisjoint(request.headers):
        check_rare(request)
    trace, rank = request.headers.get("traceparent"), request.scope.get("routed_dp_rank")
    return {"created": time.time(), "traceparent": trace, "routed_dp_rank": rank}


async def read_body(request: Request) -> bytes:
    """The body of a JSON request. Raises RequestError: another type, a query, its size."""
    if request.scope["query_string"]:
        check_query(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        check_type(kind, request.url.path)
    declared = request.headers.get("content-length", "")
    _check_size(int(declared[:19]) if declared.isdecimal() else 0)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        _check_size(len(body))
    if packing := request.headers.get("content-encoding"):
        body = await unpacked(bytes(body), packing, MAX_BODY_BYTES + 1)
        _check_size(len(body))
    return bytes(body)


async def made_of_body(request: Request, make: Callable[[bytes], _T], pool: Executor) -> _T:
    """What `make` makes of the body; of a large one in `pool`, so that others go on meanwhile."""
    body = await read_body(request)
    if len(body) <= LARGE_BODY:
        return make(body)
    work = asyncio.get_running_loop().run_in_executor(pool, make, body)
    return await while_connected(request.receive, work)


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise TooLargeError(f"The body is over the limit of {MAX_BODY_BYTES} bytes.")


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Await `work`. When the client leaves, it is cancelled and ClientDisconnect raised."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stream_response(request: Request, serving: Serving, events: _Lines) -> Response:
    """Answer with `events`. What fails before the first is raised, and so has its HTTP status."""
    first = await while_connected(request.receive, anext(events))
    return _EventStream(first, events, request.url.path, serving.engine.meter.timing)


class _EventStream(StreamingResponse):
    """`first` and the rest of `events`; closed when the response ends or the client leaves."""

    def __init__(self, first: bytes, events: _Lines, path: str, timing: Timing) -> None:
        self._events, self._lines = events, _framed(first, events, path, timing)
        super().__init__(self._lines, headers=_STREAM_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events), contextlib.aclosing(self._lines):
            with contextlib.suppress(ClientDisconnect, OSError):
                await while_connected(receive, self.stream_response(send))


async def _framed(first: bytes, events: _Lines, path: str, timing: Timing) -> _Lines:
    """Closed by [DONE]; what fails on the way becomes an event."""
    yield first
    try:
        async for event in events:
            started = time.perf_counter()
            yield event  # until it is sent
            timing.observe("output_stream_seconds", time.perf_counter() - started)
    except Exception as error:  # the status is sent: an event must say it
        yield error_event(error, path)
    yield b"data: [DONE]\n\n"
