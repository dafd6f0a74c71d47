"""A server of one's own for programs: started, waited for, and stopped.

Owns the process, which ends with this one (keeper.py); programs run on its `endpoint`, and other
requests go over HTTP.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from jserve.config import Config
from jserve.config.address import http_url
from jserve.errors import ConfigError, JserveError
from jserve.lang import keeper
from jserve.lang.backends.endpoint import RuntimeEndpoint
from jserve.lang.backends.wire import told
from jserve.lang.errors import BackendError
from jserve.models.architectures import find_architecture
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.weights.checkpoint import open_checkpoint

_POLL_SECONDS = 0.5
_STOP_SECONDS = 20.0  # that it has to end by itself
_GONE_SECONDS = 1.0  # that a killed process has to be gone
_SERVE = [sys.executable, "-m", "jserve", "serve"]
_LAST_PORT = 40000


class Runtime:
    """A `jserve serve` in a process of its own, ready when the constructor returns. It ends with
    `shutdown`, at the end of this process, and when this process is killed.

    Args:
        log_level: of the server.
        launch_timeout: seconds that it may take to start, compiling included.
        flags: any flag of the server, with underscores; `port` is the first one that is tried.

    Raises ConfigError for flags that cannot work, JserveError when it does not start.
    """

    def __init__(
        self, log_level: str = "error", launch_timeout: float = 300.0, **flags: Any
    ) -> None:
        if not isinstance(launch_timeout, int | float) or not launch_timeout > 0:
            given = repr(launch_timeout)
            raise ConfigError(f"launch_timeout must be a number of seconds > 0, got {given}")
        wanted = Config.from_flags(**{"log_level": log_level, **flags})
        port = _free_port(wanted.server.host, wanted.server.port)
        self.config = Config.from_flags(**{**wanted.flat(), "port": port})
        self.url = http_url(wanted.server.host, port)
        self._folder = tempfile.TemporaryDirectory(prefix="jserve-runtime-")
        self._log = Path(self._folder.name, "log")
        self._process = self._start()
        try:
            self._wait(launch_timeout)
            self.endpoint = RuntimeEndpoint(self.url, self.config.server.api_key)
        except BaseException:
            self._stop()
            raise
        atexit.register(self.shutdown)

    def generate(
        self, prompt: str | list[str], sampling_params: Mapping[str, Any] | None = None, **more: Any
    ) -> str:
        """The answer of /generate as JSON text; `more` are other fields of its body."""
        return json.dumps(self._post(prompt, sampling_params, more).json())

    async def async_generate(
        self, prompt: str, sampling_params: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[str, None]:
        """The text of one answer, piece by piece."""
        body = {"text": prompt, "sampling_params": dict(sampling_params or {}), "stream": True}
        length = 0
        with told("POST /generate", self.url):
            async with (
                httpx.AsyncClient(headers=self._headers(), timeout=None) as client,
                client.stream("POST", f"{self.url}/generate", json=body) as reply,
            ):
                if reply.is_error:
                    raise BackendError((await reply.aread()).decode(errors="replace"))
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and "[DONE]" not in line:
                        text = json.loads(line.removeprefix("data:")).get("text", "")
                        yield text[length:]
                        length = len(text)

    add_request = async_generate

    def encode(self, prompt: str | list[str]) -> str:
        """Refused: no model that embeds is served yet."""
        raise BackendError("encode: no model that embeds is served yet")

    def start_profile(self) -> None:
        """Refused: the server has no profiler yet."""
        raise BackendError("start_profile: the server has no profiler yet; see jserve bench")

    stop_profile = start_profile

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def flush_cache(self) -> bool:
        return self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.endpoint.get_server_info()

    def get_tokenizer(self) -> Tokenizer:
        model = self.config.model
        checkpoint = open_checkpoint(model, find_architecture)
        return load_tokenizer(checkpoint, model.tokenizer_path, model.chat_template)

    def shutdown(self) -> None:
        """Stop the server; programs under way are cancelled. Later calls do nothing."""
        atexit.unregister(self.shutdown)
        self.endpoint.shutdown()
        self._stop()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _headers(self) -> dict[str, str]:
        key = self.config.server.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _post(
        self,
        prompt: str | list[str],
        sampling_params: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> httpx.Response:
        body = {"text": prompt, "sampling_params": dict(sampling_params or {}), **more}
        url = f"{self.url}/generate"
        with told("POST /generate", self.url):
            reply = httpx.post(url, json=body, headers=self._headers(), timeout=None)
        if reply.is_error:
            raise BackendError(f"POST /generate → {reply.status_code}: {reply.text}")
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        config = Path(self._folder.name, "flags.yaml")
        given = {name: value for name, value in self.config.flat().items() if value is not None}
        config.write_text(yaml.safe_dump(given))
        config.chmod(0o600)  # the key is in it
        command = [*_SERVE, "--config", str(config)]
        with self._log.open("wb") as sink:
            return subprocess.Popen(
                keeper.command_of(self._folder.name, _STOP_SECONDS, command),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if (code := self._process.poll()) is not None:
                kind = ConfigError if code == 2 else JserveError
                raise kind(f"the server ended with {code}: {self._last_words()}")
            with contextlib.suppress(httpx.TransportError):
                url = f"{self.url}/health_generate"
                if httpx.get(url, timeout=min(left, 30.0), headers=self._headers()).is_success:
                    return
            time.sleep(_POLL_SECONDS)
        raise JserveError(
            f"the server was not ready within launch_timeout={timeout:g} seconds and was stopped; "
            f"a larger one gives it more (its last line: {self._last_words()})"
        )

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _stop(self) -> None:
        with self._process:  # waits, and closes the pipe
            self._process.terminate()
        if self._process.returncode == -signal.SIGKILL:
            _wait_for_group(self._process.pid)
        self._folder.cleanup()


def _wait_for_group(group: int) -> None:
    """Its first process was killed with the others, which may take a moment longer. Not for ever:
    where nobody looks after orphans they stay listed."""
    deadline = time.monotonic() + _GONE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


def _free_port(host: str, first: int) -> int:
    """The first port from `first` on that nobody listens on. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, _LAST_PORT):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ConfigError(f"--port: none is free from {first} to {_LAST_PORT - 1}")
