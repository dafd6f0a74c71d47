"""Typed errors, and the one place where they are mapped to HTTP.

JserveError
├── ConfigError            flags or a model that cannot be served (start-up; exit code 2)
│   └── WeightError        a checkpoint that is missing a tensor, truncated, or of the wrong shape
├── RequestError           the caller's fault (400); `.param` names the field
│   ├── NotFoundError      unknown model or route object (404)
│   ├── AuthError          missing or wrong key (401)
│   ├── TooLargeError      body over the limit (413)
│   └── MediaError         body packed in a way that is not read here (415)
├── QueueFullError         the waiting queue is full (503)
├── TimedOutError          it waited or ran for longer than the server allows (503)
└── EngineDeadError        the engine process ended or lost its device (503)

Our own faults are `assert`s with both values, never one of these.
"""

from __future__ import annotations

_LONGEST_MESSAGE = 500  # characters; what a caller sent may be longer, and comes back in messages


class JserveError(Exception):
    """Base of every error that jserve raises on purpose."""

    status_code = 500
    err_type = "InternalServerError"


class ConfigError(JserveError):
    """A configuration that cannot work; the message names the flags and what would work."""


class WeightError(ConfigError):
    """A checkpoint that cannot be loaded; the message names file and tensor."""


class RequestError(JserveError):
    """A request that cannot be served as written: `message` says what is wrong and what would be
    right, `param` is the field at fault, dotted for nested ones, or None for the whole body. Both
    are cut in the middle when they are long."""

    status_code = 400
    err_type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = _shortened(message)
        self.param = None if param is None else _shortened(param)
        super().__init__(self.message)


class NotFoundError(RequestError):
    """The request names something that does not exist here."""

    status_code = 404
    err_type = "NotFoundError"


class AuthError(RequestError):
    """The bearer key is missing or wrong."""

    status_code = 401
    err_type = "AuthenticationError"


class TooLargeError(RequestError):
    """The body is larger than the server accepts."""

    status_code = 413
    err_type = "RequestEntityTooLarge"


class MediaError(RequestError):
    """The body is packed in a way that is not read here."""

    status_code = 415
    err_type = "UnsupportedMediaType"


class QueueFullError(JserveError):
    """The waiting queue is full; try again later."""

    status_code = 503
    err_type = "ServiceUnavailableError"


class TimedOutError(JserveError):
    """The request waited or ran for longer than the server allows; try again later."""

    status_code = 503
    err_type = "TimeoutError"


class EngineDeadError(JserveError):
    """The engine process ended; open requests are lost."""

    status_code = 503
    err_type = "ServiceUnavailableError"


def _shortened(text: str) -> str:
    """The beginning of a long text, and its end, which often says what would be right; what UTF-8
    has not is written as Python does."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _LONGEST_MESSAGE:
        return text
    return f"{text[: _LONGEST_MESSAGE - 150]} … {text[-147:]}"
