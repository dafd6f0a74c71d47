"""What comes before a model is loaded: what is known to be wrong by then costs nobody a minute, and
nobody gets a port that is taken.
"""

from __future__ import annotations

import errno
import socket

from jserve.config import Config, check_together
from jserve.config.cache_dir import compilation_cache
from jserve.engine.sampling_defaults import sampling_defaults
from jserve.errors import ConfigError
from jserve.models.architectures import find_architecture
from jserve.tokenizer.template_dialect import compile_template, read_template
from jserve.weights.checkpoint import is_here, open_checkpoint

_BACKLOG = 2048


def check_early(config: Config) -> None:
    """Options, the files that they name, and the model unless it is to be downloaded. Raises
    ConfigError."""
    check_together(config)
    compilation_cache(config.execution)
    if config.model.chat_template is not None:
        compile_template(read_template(config.model.chat_template))
    if is_here(config.model.model_path):
        sampling_defaults(open_checkpoint(config.model, find_architecture))


def listen(host: str, port: int) -> socket.socket:
    """Listening from now on: nobody else gets the port, and early clients wait in its queue.

    Raises ConfigError that names the flag and what to do.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # a port whose last server has just ended is free
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_problem(host, port, error)) from None
    return listener


def _problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = "stop what listens there, or give another --port (0: any that is free)"
        return f"--port {port} is in use at --host {host}; {free}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"--port {port} is not allowed for this user; give a --port from 1024 on"
    return f"--host {host} is no address of this machine: {error.strerror or error}"
