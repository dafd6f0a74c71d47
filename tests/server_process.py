"""A real `jserve serve` in a process of its own, for tests that go through HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serving(
    *flags: str, timeout: float = 300.0, env: dict[str, str] | None = None
) -> Iterator[httpx.Client]:
    """As serving_process, without the process."""
    with serving_process(*flags, timeout=timeout, env=env) as (client, _):
        yield client


@contextlib.contextmanager
def serving_process(
    *flags: str, timeout: float = 300.0, env: dict[str, str] | None = None
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Start the server with `flags`, yield a client bound to it once /health answers 200 and the
    API process, stop it at exit.

    The server runs with one CPU device and `--recompile-guard error`: a compile after ready fails
    the test that caused it.
    """
    port = free_port()
    base = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **(env or {})}
    command = [
        sys.executable,
        "-m",
        "jserve",
        "serve",
        "--port",
        str(port),
        "--recompile-guard",
        "error",
        *flags,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=base, start_new_session=True
            )
        try:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout)
            with client:
                _wait_ready(process, client, log, timeout)
                yield client, process
        finally:
            _stop(process)


def _wait_ready(
    process: subprocess.Popen[bytes], client: httpx.Client, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(
                f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}"
            )
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health", timeout=30.0).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"not ready after {timeout} s:\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            raise AssertionError("the server did not stop within 20 s of SIGTERM") from None
