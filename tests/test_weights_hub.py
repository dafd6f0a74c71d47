"""A hub id as --model-path, against a small hub on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants

from jserve.errors import ConfigError
from jserve.weights.checkpoint import open_checkpoint

COMMITS = {"main": "a" * 40, "old": "b" * 40}
TOKEN = "hf_secret"


@dataclasses.dataclass(frozen=True)
class Source:
    model_path: str
    revision: str | None = None
    load_format: str = "auto"


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves one repository, acme/tiny, in two revisions; acme/gated wants a token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        weights = safetensors.numpy.save({"w": np.arange(6, dtype=np.float32)})
        self.files = {
            "config.json": b"",  # differs between revisions
            "generation_config.json": b'{"eos_token_id": [7, 8]}',
            "model.safetensors": weights,
            "pytorch_model.bin": b"never fetched",
            "original/consolidated.safetensors": b"never fetched",
        }

    def content(self, revision: str, name: str) -> bytes:
        if name == "config.json":
            return json.dumps({"model_type": "llama", "revision": revision}).encode()
        return self.files[name]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        self.server.requests.append(format % args)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if "acme/gated" in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        path = path.replace("acme/gated", "acme/tiny")
        if path.startswith("/api/models/acme/tiny"):
            return self._api(path, body)
        if "/resolve/" in path and path.startswith("/acme/tiny/"):
            revision, _, name = path.removeprefix("/acme/tiny/resolve/").partition("/")
            branch = {commit: name for name, commit in COMMITS.items()}.get(revision, revision)
            if branch in COMMITS and name in self.server.files:
                content = self.server.content(branch, name)
                headers = {
                    "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                    "X-Repo-Commit": COMMITS[branch],
                }
                return self._send(200, content, headers, body)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _api(self, path: str, body: bool) -> None:
        parts = path.removeprefix("/api/models/acme/tiny").strip("/").split("/")
        revision = parts[1] if len(parts) > 1 else "main"
        branch = {commit: name for name, commit in COMMITS.items()}.get(revision, revision)
        if branch not in COMMITS:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        files = self.server.files
        if parts[0] == "tree":
            answer: object = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(self.server.content(branch, name)),
                    "oid": "0" * 40,
                }
                for name in files
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            answer = {"id": "acme/tiny", "sha": COMMITS[branch], "siblings": siblings}
        return self._send(
            200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_is_downloaded_and_only_what_is_needed(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(Source("acme/tiny"))
    assert checkpoint.kind == "safetensors"
    assert checkpoint.hf_config["revision"] == "main"
    assert checkpoint.generation_config["eos_token_id"] == [7, 8]
    np.testing.assert_array_equal(checkpoint.tensors().read("w"), np.arange(6))
    fetched = {path.name for path in checkpoint.path.rglob("*") if path.is_file()}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}


def test_the_revision_is_honoured(hub: FakeHub) -> None:
    assert open_checkpoint(Source("acme/tiny", revision="old")).hf_config["revision"] == "old"
    with pytest.raises(ConfigError, match="acme/tiny at revision nope"):
        open_checkpoint(Source("acme/tiny", revision="nope"))


def test_the_token_opens_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="acme/gated"):
        open_checkpoint(Source("acme/gated"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert open_checkpoint(Source("acme/gated")).kind == "safetensors"


def test_an_unknown_model_is_one_clear_error(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="acme/none: no such path here"):
        open_checkpoint(Source("acme/none"))


def test_what_is_in_the_cache_needs_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint(Source("acme/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert open_checkpoint(Source("acme/tiny")).hf_config["revision"] == "main"
    assert hub.requests == []
    with pytest.raises(ConfigError, match="acme/other"):
        open_checkpoint(Source("acme/other"))


def test_random_weights_fetch_no_weights(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(Source("acme/tiny", load_format="dummy"))
    assert checkpoint.kind == "dummy"
    assert not any("safetensors" in line for line in hub.requests)


def test_an_unreachable_hub_is_one_clear_error(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="acme/tiny: no such path here"):
        open_checkpoint(Source("acme/tiny"))
