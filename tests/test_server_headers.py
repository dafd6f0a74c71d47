"""Headers that few requests have."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from fake_server_engine import Api

from jserve.server import exchange

BODIES = {
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
JSON = {"content-type": "application/json"}


def send(api, path, headers, content=None, body=None):
    content = json.dumps(BODIES[path] if body is None else body) if content is None else content
    return api.call("POST", path, content=content, headers={**JSON, **headers})


def message(response):
    return response.json().get("message") or response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("named", ["1", "zz", "-1", "0.0", "", "9" * 30])
def test_a_server_with_one_rank_refuses_a_header_that_names_another(path, named):
    api = Api()
    response = send(api, path, {"x-data-parallel-rank": named})
    assert response.status_code == 400 and api.engine.requests == []
    assert message(response).startswith("x-data-parallel-rank must be ")


@pytest.mark.parametrize("path", BODIES)
def test_labels_in_a_header_are_refused_as_those_of_a_body_are(path):
    response = send(Api(), path, {"x-custom-labels": '{"a":"b"}'})
    assert response.status_code == 400 and "x-custom-labels is not supported" in message(response)


@pytest.mark.parametrize("path", BODIES)
def test_headers_that_ask_for_nothing_or_for_the_only_rank_are_taken(path):
    for headers in ({"x-data-parallel-rank": "0"}, {"x-custom-labels": "{}"}):
        assert send(Api(), path, headers).status_code == 200


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("packing", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("Identity, X-GZIP", gzip.compress)],
)
def test_a_packed_body_is_unpacked(path, packing, pack, ranks):
    api = Api(dp_size=ranks)
    content = pack(json.dumps(BODIES[path]).encode())
    response = send(api, path, {"content-encoding": packing}, content)
    assert response.status_code == 200, response.text
    assert len(api.engine.requests) == 1


def test_a_packed_body_names_its_rank_as_another_does():
    api = Api(dp_size=2)
    content = gzip.compress(json.dumps({**BODIES["/generate"], "routed_dp_rank": 1}).encode())
    assert send(api, "/generate", {"content-encoding": "gzip"}, content).status_code == 200
    assert api.engine.requests[-1].routed_dp_rank == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("packing", ["br", "zstd", "gzip, deflate", "gzip;q=1"])
def test_another_packing_is_415_with_those_that_are_read(path, packing):
    response = send(Api(), path, {"content-encoding": packing}, b"\x1f\x8b")
    assert response.status_code == 415
    assert "Content-Encoding must be one of gzip, x-gzip, deflate" in message(response)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b'{"text": "abc"}', "incorrect header check"),
        (gzip.compress(b'{"text": "abc"}')[:-9], "ends too early"),
        (b"", "ends too early"),
        (gzip.compress(b"{}") * 2, "goes on after its end"),
    ],
)
def test_a_body_that_is_not_packed_as_its_header_says_is_400(content, wrong):
    response = send(Api(), "/generate", {"content-encoding": "gzip"}, content)
    assert response.status_code == 400
    assert "The body is not the gzip of Content-Encoding" in message(response)
    assert wrong in message(response)


def test_what_a_packed_body_holds_is_within_the_limit_of_bodies(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 1000)
    for length, status in ((900, 200), (1000, 413), (100_000, 413)):
        body = {**BODIES["/generate"], "routing_key": "k" * length}
        content = gzip.compress(json.dumps(body).encode())
        assert len(content) < 500
        response = send(Api(), "/generate", {"content-encoding": "gzip"}, content)
        assert response.status_code == status, (length, response.text)


@pytest.mark.parametrize("path", BODIES)
def test_a_rank_is_found_whose_name_is_written_by_numbers(path):
    api = Api(dp_size=2)
    content = json.dumps({**BODIES[path], "routed_dp_rank": 1})
    response = send(api, path, {}, content.replace("routed_dp", "routed\\u005fdp"))
    assert response.status_code == 200, response.text
    assert api.engine.requests[-1].routed_dp_rank == 1
