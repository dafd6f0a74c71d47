"""A Runtime's start: which flags and ports it takes, and how one that cannot start ends."""

from __future__ import annotations

import socket
import tempfile
import threading

import pytest

import jserve.lang as sgl
from jserve.config.address import http_url
from jserve.errors import ConfigError, JserveError
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
