"""A Runtime's start: which flags and ports it takes, and how one that cannot start ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import jserve.lang as sgl
from jserve.config.address import http_url
from jserve.errors import ConfigError, JserveError
from jserve.lang import keeper, runtime
from jserve.lang.runtime import _free_port

pytestmark = pytest.mark.timeout(100)


def test_wrong_flags_are_told_before_anything_starts():
    with pytest.raises(ConfigError, match="did you mean --page-size"):
        sgl.Runtime(model_path="m", page_sise=1)
    with pytest.raises(ConfigError, match="--model-path is required"):
        sgl.Runtime()


@pytest.mark.parametrize("seconds", [0, -1, "300", None, float("nan")])
def test_a_launch_timeout_that_is_none_is_told_before_anything_starts(seconds):
    with pytest.raises(ConfigError, match=r"launch_timeout must be a number of seconds > 0, got "):
        sgl.Runtime(model_path="no/such/model.gguf", launch_timeout=seconds)


def test_a_server_that_takes_too_long_is_stopped_and_says_what_to_change():
    with pytest.raises(JserveError, match=r"not ready within launch_timeout=0\.2 seconds and was"):
        sgl.Runtime(model_path="no/such/model.gguf", port=31_600, launch_timeout=0.2)


def test_the_first_port_that_nobody_has_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        if port < 39_000:
            assert _free_port("127.0.0.1", port) > port
    with pytest.raises(ConfigError, match="none is free from 40000"):
        _free_port("127.0.0.1", 40_000)


@pytest.mark.parametrize(
    ("host", "family", "url"),
    [
        ("127.0.0.1", socket.AF_INET, "http://127.0.0.1:31700"),
        ("::1", socket.AF_INET6, "http://[::1]:31700"),
    ],
)
def test_ports_are_probed_in_the_addresss_own_family(host, family, url, monkeypatch):
    asked = []

    class Probe(socket.socket):  # this machine may have no IPv6
        def __init__(self, family=socket.AF_INET):
            asked.append(family)
            super().__init__()

        def bind(self, address):
            super().bind(("127.0.0.1", 0))

    monkeypatch.setattr(socket, "socket", Probe)
    assert http_url(host, _free_port(host, 31_700)) == url and asked == [family]


def test_a_server_that_cannot_start_is_told_in_its_own_words_and_leaves_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other processes use the common one
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"the server ended with 2: .*no/such/model.gguf"):
        sgl.Runtime(model_path="no/such/model.gguf", port=31_500)
    assert set(threading.enumerate()) <= before and not list(tmp_path.iterdir())


#: Answers whatever it is asked, on the port of its flags; with "deaf" it does not end when asked.
SERVER = """
import http.server, os, signal, sys, yaml

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))["port"]
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
#: Starts it as a Runtime, and is there until it is killed.
CALLER = """
import sys, time
from jserve.lang import runtime
runtime._SERVE = sys.argv[2:]
one = runtime.Runtime(model_path="m", port=int(sys.argv[1]))
print(one.url.rpartition(":")[2], one._folder.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """The command of a server that costs nothing."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    command = [sys.executable, str(path)]
    monkeypatch.setattr(runtime, "_SERVE", command)
    return command


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_ends_with_its_caller_however_that_ends(serve):
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, "31800", *serve], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
    port, folder = caller.stdout.readline().split()
    assert listens(int(port)) and Path(folder, "flags.yaml").exists()
    caller.kill()
    caller.wait()
    wait_until(lambda: not listens(int(port)) and not Path(folder).exists())
    caller.stdout.close()


def test_what_was_killed_is_waited_for_until_it_is_gone(monkeypatch):
    slow = subprocess.Popen(["sleep", "30"], start_new_session=True)
    monkeypatch.setattr(runtime, "_GONE_SECONDS", 0.2)
    begin = time.monotonic()
    runtime._wait_for_group(slow.pid)  # not for ever
    assert 0.2 <= time.monotonic() - begin < 5
    monkeypatch.setattr(runtime, "_GONE_SECONDS", 30.0)
    killer = threading.Timer(0.3, lambda: (slow.kill(), slow.wait()))
    killer.start()
    runtime._wait_for_group(slow.pid)
    killer.join()
    assert slow.returncode == -signal.SIGKILL


def test_shutdown_ends_a_server_that_is_deaf_too_and_twice_is_once(serve, monkeypatch):
    monkeypatch.setattr(runtime, "_STOP_SECONDS", 0.3)
    serve.append("deaf")
    before = set(threading.enumerate())
    with sgl.Runtime(model_path="m", port=31_850) as one:
        port = int(one.url.rpartition(":")[2])
        assert listens(port)
        held = os.dup(one._process.stdin.fileno())  # as a forked process would
    assert not listens(port) and not Path(one._folder.name).exists()
    assert one._process.returncode == -signal.SIGKILL
    os.close(held)
    one.shutdown()
    one.endpoint.shutdown()
    with pytest.raises(sgl.BackendError, match=f"POST /generate at {one.url}: "):
        one.generate("x")
    with pytest.raises(sgl.BackendError, match=f"POST /generate at {one.url}: "):
        asyncio.run(anext(one.async_generate("x")))
    assert set(threading.enumerate()) <= before


def test_a_kept_commands_exit_code_is_its_keepers(tmp_path):
    codes = []
    for code in ("import sys; sys.exit(2)", "import os; os.kill(os.getpid(), 9)"):
        command = keeper.command_of(str(tmp_path), 1.0, [sys.executable, "-c", code])
        with subprocess.Popen(command, stdin=subprocess.PIPE) as kept:
            codes.append(kept.wait())
    assert codes == [2, 128 + 9] and tmp_path.exists()
