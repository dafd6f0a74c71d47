"""The server on real sockets: the openai client, clients that leave, start-up, signals, the end."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import uvicorn
from fake_server_engine import Api, expected

HELLO_IDS = list(b"user:hi\nassistant:")
HELLO = [{"role": "user", "content": "hi"}]
HANG = {"input_ids": list(b"hang"), "rid": "h"}


@contextlib.contextmanager
def running(api):
    """The app behind uvicorn in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="error"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a client that is faster than the thread waits and is not refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def live():
    api = Api(enable_cache_report=True, api_key="key")
    with running(api) as (host, port):
        yield api, f"http://{host}:{port}"


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live[1]}/v1", api_key="key", max_retries=0) as one:
        yield one


def test_the_openai_client_gets_its_types(client):
    answer = client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=1, n=2, seed=1
    )
    assert answer.choices[0].message.content == expected(HELLO_IDS, 3)
    assert answer.choices[1].logprobs.content[0].top_logprobs[0].logprob < 0
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert client.completions.create(model="default", prompt="a", logprobs=1).choices[0].logprobs
    assert [card.id for card in client.models.list()] == ["fake/model"]


def test_the_openai_client_streams(client):
    stream = client.chat.completions.create(
        model="default",
        messages=HELLO,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(HELLO_IDS, 4)
    assert chunks[-1].usage.completion_tokens == 4


def test_the_openai_client_raises_its_own_errors(client, live):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=HELLO, top_p=2)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live[1]}/v1", api_key="wrong").models.list()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_a_stream_closes_the_engines_iterator(live, path):
    api, url = live
    body = {"prompt": list(b"hang"), "rid": "h"} if path != "/generate" else HANG
    headers = {"authorization": "Bearer key"}
    api.engine.closed.clear()
    with httpx.stream("POST", url + path, json=body | {"stream": True}, headers=headers) as answer:
        lines = answer.iter_lines()  # kept: dropping it would close the connection
        assert next(lines).startswith("data: ")
        assert list(api.engine.open) == ["h"]
    wait_for(lambda: api.engine.closed == ["h"])
    assert not api.engine.open


@pytest.mark.parametrize("body", [HANG, {"input_ids": [HANG["input_ids"]] * 2, "rid": "h"}])
def test_a_client_that_leaves_before_its_answer_closes_the_engines_iterators(live, body):
    api, url = live
    api.engine.closed.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/generate", json=body, headers={"authorization": "Bearer key"}, timeout=0.3
        )
    wait_for(lambda: api.engine.closed and not api.engine.open)


def test_an_http_2_preface_is_refused_and_the_server_goes_on(live):
    host, port = live[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert raw.recv(100).startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{live[1]}/health").status_code == 200


SCRIPT = """
import multiprocessing, sys, threading, time
from fake_server_engine import FakeEngine
from jserve.__main__ import main
from jserve.errors import ConfigError
import jserve.server.app as app

class Late(FakeEngine):
    @classmethod
    def from_config(cls, config):
        delay, fate = {fate}
        time.sleep(delay)
        if fate == "refuse":
            raise ConfigError("no such model")
        engine = cls(config)
        if fate == "stubborn":  # so is its process
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            print("child", child.pid, flush=True)
            engine.shutdown = child.join
        if fate == "downloading":
            threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
        if fate == "die":
            threading.Timer(1.0, engine.die).start()
        return engine

    def die(self):
        for loop in list(self.loops):
            loop.call_soon_threadsafe(super().die)
        self.healthy = False

    async def generate_stream(self, req):
        import asyncio
        self.loops.add(asyncio.get_running_loop())
        async for output in super().generate_stream(req):
            yield output

    loops = set()

app.Engine = Late
sys.exit(main(["serve", "--model-path", "fake", "--port", "0", "--log-level", "info"]))
"""


@contextlib.contextmanager
def serving(delay, fate):
    """`jserve serve` in a process of its own, on a fake engine; yields it and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{fate}", repr((delay, fate)))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ".:..", "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process, word):
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"{word} never came")


def rest(process):
    return process.stdout.read()


def test_the_server_answers_503_while_it_starts_and_stops_cleanly_on_sigterm():
    with serving(1.5, "live") as process:
        url = read_until(process, "listening at").split(" at ")[1].split(";")[0]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/generate", json={"text": "a"}).status_code == 503
        assert httpx.get(url).status_code == 200
        read_until(process, "fired up and ready to roll!")
        assert read_until(process, "ready at").strip() == f"ready at {url}"
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_signal_while_loading_stops_the_server():
    with serving(60.0, "live") as process:
        read_until(process, "listening at")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


@pytest.mark.parametrize("open_stream", [True, False])
def test_a_second_sigint_ends_the_server_at_once_with_one_line_and_leaves_no_process(open_stream):
    with serving(0.0, "stubborn") as process, contextlib.ExitStack() as stack:
        child = psutil.Process(int(read_until(process, "child").split()[1]))
        url = read_until(process, "ready at").split()[-1]
        if open_stream:
            body = HANG | {"stream": True}
            stream = stack.enter_context(httpx.stream("POST", f"{url}/generate", json=body))
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        read_until(process, "shutting down")
        time.sleep(0.3)
        assert process.poll() is None, "it waits for the stream, or for its engine"
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - started < 2
        said = rest(process).splitlines()
        assert said == ["jserve: interrupted again; ended at once, open requests are lost"]
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_sigint_after_the_end_does_not_wait_for_threads_that_go_on():
    with serving(0.0, "downloading") as process:
        read_until(process, "ready at")
        process.send_signal(signal.SIGINT)
        read_until(process, "shutting down")
        time.sleep(0.5)
        assert process.poll() is None, "a thread goes on"
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == 130
        assert rest(process).startswith("jserve: interrupted again")


def test_a_model_that_cannot_load_ends_the_server_with_its_message():
    with serving(0.0, "refuse") as process:
        assert "no such model" in read_until(process, "jserve: error")
        assert process.wait(10) == 2


def test_an_engine_that_dies_fails_open_requests_and_ends_the_server():
    with serving(0.0, "die") as process:
        url = read_until(process, "ready at").split()[-1]
        answer = httpx.post(f"{url}/generate", json=HANG, timeout=5)
        assert answer.status_code == 503 and "ended" in answer.json()["error"]["message"]
        assert "the engine process ended" in read_until(process, "jserve: ")
        assert process.wait(10) == 1
