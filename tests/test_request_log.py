"""--log-requests: what each level shows and hides, and that it can be changed while serving."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import fake_engine
import httpx
import pytest

from jserve.config import Config
from jserve.engine.engine import Engine
from jserve.server.app import create_app
from jserve.types import GenerateRequest, SamplingParams

SECRET = "a secret prompt "


class Tokenizer(fake_engine.ByteTokenizer):
    template_hash = "3f2a"

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode()


class Server:
    """An engine of scripted steps behind the real app."""

    def __init__(self, **flags: Any) -> None:
        self.config = Config.from_flags(model_path="fake", log_level="error", **flags)
        self.engine = Engine(
            config=self.config,
            inline=True,
            builder="fake_engine:build",
            tokenizer=Tokenizer(),  # type: ignore[arg-type]
        )
        self.app = create_app(self.engine, self.config)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def call(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(send())

    def generate(self, text: str = SECRET, **body: Any) -> dict:
        params = {"max_new_tokens": 5, "temperature": 0, **body.pop("sampling_params", {})}
        body = {"text": text, "sampling_params": params, **body}
        response = self.call("POST", "/generate", body)
        assert response.status_code == 200, response.text
        return {} if body.get("stream") else response.json()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jserve.requests")

    def take() -> list[tuple[str, dict]]:
        parts = [message.split(": ", 1) for message in caplog.messages]
        caplog.clear()
        return [(name, json.loads(text)) for name, text in parts]

    return take


def test_a_request_that_asks_for_it_and_a_health_check_have_no_line(lines) -> None:
    with Server(log_requests=True) as server:
        server.generate(no_logs=True)
        assert server.call("GET", "/health_generate").status_code == 200
        assert lines() == []
        server.generate(no_logs=False)
        assert [name for name, _ in lines()] == ["Receive", "Finish"]


def test_without_the_flag_nothing_is_logged(lines) -> None:
    with Server() as server:
        server.generate()
        assert server.engine.request_log.configuration == {
            "log_requests": False,
            "log_requests_level": 2,
        }
    assert lines() == []


def test_each_level_shows_what_the_one_before_does_and_more(lines) -> None:
    shown: dict[int, list[tuple[str, dict]]] = {}
    for level in range(4):
        with Server(log_requests=True, log_requests_level=level) as server:
            params = {"stop": ["zzz"], "top_p": 0.5, "min_p": 0.0, "logit_bias": {"7": -1.0}}
            answer = server.generate(rid="r", sampling_params=params)
        shown[level] = lines()
    (receive, begun), (finish, ended) = shown[0]
    assert (receive, finish) == ("Receive", "Finish")
    expected = {"rid": "r", "prompt_tokens": 16, "template_hash": "3f2a", "n": 1, "stream": False}
    assert begun == expected
    assert {name: ended[name] for name in ("rid", "finish_reason", "prompt_tokens")} == {
        "rid": "r",
        "finish_reason": "length",
        "prompt_tokens": 16,
    }
    assert (ended["completion_tokens"], ended["cached_tokens"], ended["num_steps"]) == (5, 0, 5)
    seconds = [ended[f"{name}_seconds"] for name in ("prompt", "cache", "execution", "output")]
    assert sum(seconds) == pytest.approx(ended["e2e_seconds"], abs=1e-5) and min(seconds) >= 0
    assert 0 <= ended["queue_seconds"] < ended["first_token_seconds"] <= ended["e2e_seconds"]
    for level in (1, 2, 3):
        (_, more), (_, last) = shown[level]
        assert set(more) >= {*begun, "sampling"} and set(last) >= set(ended)
        sampling = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 0.5, "stop": ["zzz"]}
        assert more["sampling"] == sampling | {"logit_bias": {"7": -1.0}}
        assert last["finish_reason"] == {"type": "length", "length": 5}
        assert ("text" in more) == ("text" in last) == (level >= 2)
    assert shown[3][0][1]["text"] == SECRET and shown[3][1][1]["text"] == answer["text"]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_no_prompt_and_no_answer_is_logged_below_level_two(
    level: int, as_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jserve")
    with Server(log_requests=True, log_requests_level=level) as server:
        prompt = {"text": None, "input_ids": list(SECRET.encode())} if as_ids else {}
        answer = server.generate(**prompt, sampling_params={"max_new_tokens": 12})
    assert any(message.startswith("Finish") for message in caplog.messages)
    assert SECRET.strip() not in caplog.text and answer["text"] not in caplog.text
    assert str(list(SECRET.encode()))[1:-1] not in caplog.text


def test_a_stop_string_is_named_from_level_one_on(lines) -> None:
    for level in (0, 1):
        with Server(log_requests=True, log_requests_level=level) as server:
            whole = server.generate(sampling_params={"max_new_tokens": 9})["text"]
            lines()
            stop = {"stop": [whole[4:6]], "max_new_tokens": 9}
            server.generate(sampling_params=stop)
        reason = lines()[1][1]["finish_reason"]
        assert reason == ("stop" if level == 0 else {"type": "stop", "matched": whole[4:6]})


def test_long_texts_lose_their_middle_at_level_two_and_not_at_level_three(lines) -> None:
    prompt = "".join(chr(97 + i % 26) for i in range(400))
    with Server(log_requests=True) as server:
        log = server.engine.request_log
        assert log.configuration["log_requests_level"] == 2
        server.generate(prompt)
        assert lines()[0][1]["text"] == prompt
        whole = "x" * 3000 + "y" * 3000
        assert log._prompt([], whole) == "x" * 1024 + " … " + "y" * 1024
        assert log._prompt(list(whole.encode()), None) == log._prompt([], whole)
        log.configure(level=3)
        assert log._prompt(list(whole.encode()), None) == log._prompt([], whole) == whole


def test_every_sequence_of_a_request_ends_with_a_line_of_its_own(lines) -> None:
    with Server(log_requests=True, log_requests_level=0) as server:
        server.generate(rid="r", stream=True, sampling_params={"n": 3})
    begun, *ended = lines()
    assert begun == ("Receive", begun[1]) and begun[1]["n"] == 3 and begun[1]["stream"]
    assert {line["rid"] for _, line in ended} == {"r_0", "r_1", "r_2"}
    assert all(name == "Finish" and line["completion_tokens"] == 5 for name, line in ended)


def test_a_client_that_leaves_is_logged_and_a_refusal_of_the_engine_too(lines) -> None:
    async def leave(engine: Engine) -> None:
        sampling = SamplingParams(max_new_tokens=400)
        request = GenerateRequest(text="x", sampling=sampling, stream=True, rid="gone")
        stream = engine.generate_stream(request)
        await anext(stream)
        await stream.aclose()

    with Server(log_requests=True, log_requests_level=1) as server:
        asyncio.run(leave(server.engine))
        left = {"type": "abort", "message": "Closed before its end."}
        assert lines()[1] == ("Finish", {"rid": "gone", "finish_reason": left})
        server.generate()
        assert [name for name, _ in lines()] == ["Receive", "Finish"]


@pytest.mark.parametrize("aborted", [False, True])
def test_a_client_that_leaves_behind_the_end_has_left_nothing(lines, aborted: bool) -> None:
    async def leave(engine: Engine) -> None:
        sampling = SamplingParams(max_new_tokens=400 if aborted else 20)
        request = GenerateRequest(text="x", sampling=sampling, stream=True, rid="late")
        stream = engine.generate_stream(request)
        await anext(stream)
        if aborted:
            engine.abort("late")
        while not (await engine.control("flush_cache")).ok:
            await asyncio.sleep(0.005)
        await stream.aclose()

    with Server(log_requests=True, log_requests_level=0) as server:
        asyncio.run(leave(server.engine))
    (begun, (name, fields)) = lines()
    assert (begun[0], name, fields["rid"]) == ("Receive", "Finish", "late")
    assert fields["finish_reason"] == ("abort" if aborted else "length")
    assert fields.get("completion_tokens") == (None if aborted else 20)


def test_the_log_is_changed_while_the_server_runs(lines) -> None:
    with Server() as server:
        path = "/configure_logging"
        off = {"log_requests": False, "log_requests_level": 2}
        assert server.call("GET", path).json() == off
        on = {"log_requests": True, "log_requests_level": 0}
        assert server.call("POST", path, on).json() == on == server.call("GET", path).json()
        server.generate()
        assert [sorted(line)[0] for _, line in lines()] == ["n", "cache_seconds"]
        assert server.call("POST", path, {"log_requests_level": 3}).json()["log_requests"]
        assert server.call("POST", path, {"log_requests": True}).status_code == 200
        server.generate()
        assert len(lines()) == 2  # on twice is on once
        server.call("POST", path, {"log_requests": False})
        server.generate()
        assert lines() == []


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"log_requests_level": 4}, "log_requests_level"),
        ({"log_requests_level": "2"}, "log_requests_level"),
        ({"log_requests": 1}, "log_requests"),
        ({"dump_requests_folder": "/x"}, "dump_requests_folder"),
        ({"dump_requests_threshold": 10}, "dump_requests_threshold"),
        ({"crash_dump_folder": "/x"}, "crash_dump_folder"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_configuration_is_refused_by_name_and_changes_nothing(body: dict, name: str) -> None:
    with Server(log_requests=True) as server:
        response = server.call("POST", "/configure_logging", {"log_requests": False, **body})
        assert response.status_code == 400 and name in response.json()["error"]["message"]
        assert server.engine.request_log.configuration["log_requests"]
