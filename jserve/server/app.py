"""The FastAPI app and the process that serves it: routes, errors, start-up, signals, the end.

Refuses to know what a request means (the route files) and how it is carried out (engine).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jserve.config import Config
from jserve.config.address import http_url
from jserve.engine.early import check_early
from jserve.engine.engine import Engine
from jserve.errors import JserveError, NotFoundError, RequestError
from jserve.server.chat import ChatRoutes
from jserve.server.completions import CompletionRoutes
from jserve.server.exchange import Serving
from jserve.server.guard import Guard
from jserve.server.health import HealthRoutes
from jserve.server.http_metrics import HttpMetrics
from jserve.server.listener import listen
from jserve.server.loads import LoadRoutes
from jserve.server.log_control import LogRoutes
from jserve.server.models import ModelRoutes
from jserve.server.native import NativeRoutes
from jserve.server.pause import PauseRoutes
from jserve.server.query import with_query
from jserve.server.ranked import with_rank
from jserve.server.replies import error_response
from jserve.server.signals import Signals
from jserve.server.thinking import thinking
from jserve.server.tokens import TokenRoutes

_logger = logging.getLogger("jserve.server")

_TICK = 0.01  # seconds between looks at the HTTP server's start
_POLL = 0.25  # and at the engine
_DRAIN = 1.0  # seconds for open requests to get their error when the engine is dead
_READY = "The server is fired up and ready to roll!"
#: What a route takes in its query string; the others take nothing.
_QUERIES = {"/flush_cache": ("timeout",), "/v1/loads": ("dp_rank", "include", "format")}
#: A request may name the data-parallel rank that serves it.
_RANKED = ("/v1/chat/completions", "/v1/completions", "/generate")
#: Load balancers may ask them with what they like.
_PROBES = ("/", "/health /ready", "/health_generate")
_GRACE = 5  # seconds for open requests to finish after SIGTERM; then they end with an error


def create_app(engine: Engine, config: Config) -> FastAPI:
    """The API on a ready engine."""
    return _build_app(Serving(config, engine))


def serve(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Answers 503 while the model loads. A second SIGINT ends the
    process.

    Raises ConfigError, before it listens, for a port that is taken and what else is known to be
    wrong by then; later what the engine's start-up raises, and EngineDeadError when it ends.
    """
    check_early(config)
    listener = listen(config.server.host, config.server.port)
    level, form = config.server.log_level.upper(), "[%(asctime)s] %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%Y-%m-%d %H:%M:%S")
    serving = Serving(config)
    options = uvicorn.Config(
        _build_app(serving),
        host=config.server.host,
        port=config.server.port,
        log_level=config.server.log_level,
        access_log=config.server.log_requests,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2 * _GRACE,
        lifespan="off",
    )
    # what it says of its own start and end is said here; its errors are not
    log = logging.getLogger("uvicorn.error")
    log.setLevel(max(logging.WARNING, log.level))
    server = uvicorn.Server(options)
    signals = Signals(server)
    with asyncio.Runner(loop_factory=options.get_loop_factory()) as runner:
        runner.run(_supervise(serving, server, listener, signals))


async def _supervise(
    serving: Serving, server: uvicorn.Server, listener: socket.socket, signals: Signals
) -> None:
    """Run the HTTP server and, beside it, load the engine and watch it."""
    http = asyncio.create_task(server.serve(sockets=[listener]))
    loading, port = asyncio.wrap_future(_load(serving.config)), listener.getsockname()[1]
    url = http_url(server.config.host, port)
    try:
        while not (server.started or http.done() or loading.done()):
            await asyncio.sleep(_TICK)
        if not loading.done():
            _logger.info("listening at %s; what needs the model is 503 until it is loaded", url)
        await asyncio.wait((http, loading), return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            return
        serving.loaded = engine = loading.result()
        print(_READY, f"ready at {url}", sep="\n", flush=True)
        while engine.healthy and not (server.should_exit or http.done()):
            await asyncio.wait((http,), timeout=_POLL)
        if not server.should_exit:  # a signal to the process group ends the engine too
            await asyncio.sleep(_DRAIN)
            await engine.control("server_info")  # raises EngineDeadError with the cause
    finally:
        server.should_exit = True
        _logger.info("shutting down; open requests have %d s to finish", _GRACE)
        await signals.finish(_end(http, loading), lambda: _shut_down(loading))


async def _end(http: asyncio.Task[None], loading: asyncio.Future[Engine]) -> None:
    await asyncio.wait((http,), timeout=_GRACE)
    await asyncio.to_thread(_shut_down, loading)
    await http


def _shut_down(loading: asyncio.Future[Engine]) -> None:
    if loading.done() and loading.exception() is None:
        loading.result().shutdown()


def _load(config: Config) -> concurrent.futures.Future[Engine]:
    """Build the engine in a thread that does not hold up the end of the process."""
    future: concurrent.futures.Future[Engine] = concurrent.futures.Future()

    def load() -> None:
        try:
            future.set_result(Engine.from_config(config))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=load, name="load", daemon=True).start()
    return future


def _build_app(serving: Serving) -> FastAPI:
    app = FastAPI(title="jserve", openapi_url=None, redirect_slashes=False)
    if (key := serving.config.server.api_key) is not None:
        app.add_middleware(Guard, key=key)
    app.add_exception_handler(JserveError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    loads, logs = LoadRoutes(serving), LogRoutes(serving)
    health, tokens = HealthRoutes(serving), TokenRoutes(serving)
    models, native, pausing = ModelRoutes(serving), NativeRoutes(serving), PauseRoutes(serving)
    routes = [
        ("/v1/chat/completions", ChatRoutes(serving, *thinking(serving)).chat, "POST"),
        ("/v1/completions", CompletionRoutes(serving).completions, "POST"),
        ("/v1/models", models.models, "GET"),
        ("/v1/models/{model:path}", models.model, "GET"),
        ("/generate", native.generate, "POST PUT"),
        ("/", native.root, "GET"),
        ("/health /ready", health.health, "GET"),
        ("/health_generate", health.health_generate, "GET"),
        ("/model_info /get_model_info", native.model_info, "GET"),
        ("/server_info /get_server_info", native.server_info, "GET"),
        ("/flush_cache", native.flush_cache, "GET POST"),
        ("/abort_request", native.abort, "POST"),
        ("/pause_generation", pausing.pause, "POST"),
        ("/continue_generation", pausing.resume, "POST"),
        ("/tokenize /v1/tokenize", tokens.tokenize, "POST"),
        ("/detokenize /v1/detokenize", tokens.detokenize, "POST"),
        ("/v1/loads", loads.loads, "GET"),
        ("/get_load", loads.get_load, "GET"),
        ("/configure_logging", logs.configuration, "GET"),
        ("/configure_logging", logs.configure, "POST"),
    ]
    if serving.config.server.enable_metrics:
        app.add_middleware(HttpMetrics, serving=serving, routes=app.routes)
        routes.append(("/metrics", native.metrics, "GET"))
    for paths, handler, methods in routes:
        if paths in _RANKED and serving.config.execution.dp_size > 1:
            handler = with_rank(handler, serving.pool)
        if "GET" in methods and paths not in _PROBES:  # who takes a body checks it there
            handler = with_query(handler, _QUERIES.get(paths, ()))
        for path in paths.split():
            app.add_api_route(path, handler, methods=methods.split(), response_model=None)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JserveError), f"{error=}"
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the API's own error shape."""
    assert isinstance(error, HTTPException), f"{error=}"
    path = request.url.path
    kind = NotFoundError if error.status_code == 404 else RequestError
    failure = kind(f"{request.method} {path}: {error.detail}.")
    failure.status_code = error.status_code
    response = error_response(failure, path)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(JserveError("Internal error."), request.url.path)
