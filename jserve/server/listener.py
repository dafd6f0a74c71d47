"""The port, taken before a model is loaded: nobody waits a minute for one that another has."""

from __future__ import annotations

import errno
import socket

from jserve.errors import ConfigError

_BACKLOG = 2048


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
