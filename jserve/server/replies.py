"""How answers are written: JSON, SSE lines, and errors in the shape of the API they belong to.

The one place that knows the error bodies of both APIs; says nothing about when an error is raised.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from jserve.errors import JserveError, RequestError

_logger = logging.getLogger("jserve.server")

# How the API under /v1 calls what the engine names in its own words.
_OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


def json_response(content: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code, media_type="application/json")


def sse(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_response(error: JserveError, path: str) -> Response:
    return json_response(_error_body(error, path), error.status_code)


def error_event(error: Exception, path: str) -> bytes:
    """The SSE line for what failed in the middle of a stream; faults of ours are logged."""
    if not isinstance(error, JserveError):
        _logger.error("a stream of %s failed", path, exc_info=error)
        error = JserveError("Internal error.")
    if path.startswith("/v1"):
        return sse({"error": _error_body(error, path)})
    kind = "invalid_request_error" if error.status_code < 500 else error.err_type
    detail = {"message": str(error), "type": kind, "code": error.status_code, "retryable": False}
    return sse({"error": detail})


def _error_body(error: JserveError, path: str) -> dict[str, Any]:
    """OpenAI's error object under /v1, SGLang's elsewhere. The message names the field at fault."""
    openai = path.startswith("/v1")
    message = str(error)
    param = error.param if isinstance(error, RequestError) else None
    if openai:
        if param in ("text", "input_ids"):
            param = _PROMPT_FIELDS.get(path, param)
        param = _OPENAI_NAMES.get(param or "", param)
        for native, name in _OPENAI_NAMES.items():
            message = message.replace(native, name)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    if not openai:
        return {"error": {"message": message}}
    detail = {"message": message, "type": error.err_type, "param": param, "code": error.status_code}
    return {"object": "error", **detail}
