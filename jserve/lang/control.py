"""Which backend a program runs on, and what is asked of it beside programs."""

from __future__ import annotations

import functools
from typing import Any

from jserve.engine.engine import Engine
from jserve.lang.backends.base import Backend
from jserve.lang.backends.engine import EngineBackend
from jserve.lang.errors import ExpressionError
from jserve.lang.runtime import Runtime
from jserve.lang.settings import global_config


@functools.singledispatch
def as_backend(given: Any) -> Backend:
    """A backend as it is; an Engine or a Runtime as the backend that programs run on. Raises
    ExpressionError for what is none."""
    if not isinstance(given, Backend):
        raise ExpressionError(
            f"backend={given!r} is none: pass an Engine, a Runtime, RuntimeEndpoint(url), "
            "OpenAI(model) or TestBackend(answers)."
        )
    return given


@as_backend.register
def _(given: Engine) -> Backend:
    return EngineBackend(given)


@as_backend.register
def _(given: str) -> Backend:
    raise ExpressionError(f"backend={given!r} is a text; for a server use RuntimeEndpoint(url).")


@as_backend.register
def _(given: Runtime) -> Backend:
    return given.endpoint


def set_default_backend(backend: Any) -> None:
    """What programs run on that do not name a backend; None: nothing."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def find_backend(given: Any = None) -> Backend:
    """The given backend or the default one. Raises ExpressionError when there is neither."""
    if given is not None:
        return as_backend(given)
    if global_config.default_backend is None:
        raise ExpressionError("no backend: pass backend=, or call set_default_backend first.")
    return global_config.default_backend


def flush_cache(backend: Any = None) -> bool:
    """Drop every cached prefix; False when the backend is busy, or there is none."""
    given = backend or global_config.default_backend
    return given is not None and as_backend(given).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What the backend says of itself; None when there is none."""
    given = backend or global_config.default_backend
    return None if given is None else as_backend(given).get_server_info()
