"""The command line: help, one-line errors with exit code 2, and the two terminal commands."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

import jserve
from jserve.__main__ import chat_loop, main, print_stream
from jserve.errors import ConfigError, JserveError
from jserve.server.listener import listen
from jserve.types import FinishReason, GenerateRequest, Output, SamplingParams, Transcript

SAMPLING = SamplingParams(temperature=0.0)


class ScriptedEngine:
    """Answers with scripted pieces of text and keeps the requests; its tokens are characters."""

    has_chat_template = True

    def __init__(self, *pieces: str, finish: FinishReason | None = None) -> None:
        self.pieces = pieces
        self.finish = finish or FinishReason(type="stop")
        self.requests: list[GenerateRequest] = []
        self.tokenizer = self

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for c in "".join(f"<{m['role']}>{m['content']}" for m in messages)]

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[Output]:
        self.requests.append(request)
        text = ""
        for number, piece in enumerate(self.pieces):
            text += piece
            yield Output(
                index=0,
                rid="r",
                transcript=Transcript(ids=[], text=io.StringIO(text)),
                text_len=len(text),
                delta=piece,
                new_ids=[],
                finish=self.finish if number == len(self.pieces) - 1 else None,
                prompt_tokens=1,
                completion_tokens=number,
                cached_tokens=0,
            )


def test_generate_prints_the_pieces_and_ends_the_line(capsys) -> None:
    engine = ScriptedEngine("The capital", " is Paris", ".")
    assert print_stream(engine, GenerateRequest(sampling=SAMPLING, text="?", stream=True)) == (
        "The capital is Paris."
    )
    assert capsys.readouterr().out == "The capital is Paris.\n"


def test_an_aborted_request_is_an_error(capsys) -> None:
    engine = ScriptedEngine("", finish=FinishReason(type="abort", message="the device is gone"))
    with pytest.raises(JserveError, match="the device is gone"):
        print_stream(engine, GenerateRequest(sampling=SAMPLING, text="?", stream=True))


def test_chat_remembers_the_conversation_and_skips_empty_lines(capsys) -> None:
    engine = ScriptedEngine("yes")
    chat_loop(engine, ["one?\n", "\n", "two?\n"], SAMPLING)
    prompts = ["".join(map(chr, request.input_ids or [])) for request in engine.requests]
    assert prompts == ["<user>one?", "<user>one?<assistant>yes<user>two?"]
    assert all(request.stream and request.sampling is SAMPLING for request in engine.requests)
    assert capsys.readouterr().out == "yes\nyes\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["serve"], "--model-path is required"),
        (["serve", "m", "extra"], "unexpected argument extra"),
        (["serve", "m", "--page-sise", "1"], "--page-sise; did you mean --page-size?"),
        (["serve", "m", "--page", "1"], "unknown option --page"),
        (["serve", "m", "--page-size", "many"], "argument --page-size: invalid int value: 'many'"),
        (["serve", "m", "--page-size", "0"], "--page-size must be in [1, 1024], got 0"),
        (["serve", "m", "--dtype", "half"], "--dtype must be one of auto, float32, bfloat16"),
        (["serve", "--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read"),
        (["generate", "m"], "the following arguments are required: --prompt"),
        (["generate", "m", "--prompt", "x", "--port", "1"], "--port is not for this command"),
        (["generate", "m", "--prompt", "x", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "m", "--prompt", "x", "--no-enable-metrics"], "is not for this command"),
        (["generate", "m", "--prompt", "x", "--temperature", "nan"], "--temperature: temperature "),
        (["generate", "m", "--prompt", "x", "--max-new-tokens", "-1"], "--max-new-tokens: max_new"),
        (["generate", "m", "--prompt", "x", "--top-p", "5"], "--top-p: top_p must be in (0, 1]"),
        (["generate", "m", "--prompt", "x", "--stop", ""], "--stop: stop must be non-empty"),
        (["generate", "m", "--prompt", "x", "--stop-regex", "("], "--stop-regex: "),
        (["generate", "m", "--prompt", "x", "--choices", ""], "--choices: "),
        (["generate", "m", "--prompt", "x", "--json-schema", ""], "--json-schema: "),
        (["chat", "m", "--regex", "", "--ebnf", "a"], "cannot both hold"),
        (["generate", "m", "--prompt", "x", "--regex", "a", "--ebnf", "b"], "cannot both hold"),
        (["chat", "m", "--sampling-seed", "9" * 20], "--sampling-seed: sampling_seed must be"),
        (["serve", "m", "--dtype", "a\nb"], "got a\\nb"),
        (["serve", "m", "--model-path", "n"], "the model is m, but --model-path n; give one of"),
        (["generate", "m", "--prompt", "x", "--model", "n"], "the model is m, but --model-path n"),
        (["bench", "one-batch", "m", "--model-path=n"], "the model is m, but --model-path n"),
        (["bench", "serving", "--output-file", "/no/dir/x"], "--output-file: /no/dir/x: No such"),
        (["bench", "serving", "--plot", "/proc"], "--plot: /proc: Is a directory"),
        (["bench", "serving", "--ready-check-timeout-sec", "nan"], "must be >= 0, got nan"),
        (["bench", "serving", "--warmup-requests", "-1"], "--warmup-requests: must be >= 0"),
        (["bench", "serving", "--vocab-size", "x"], "--vocab-size: invalid int value: 'x'"),
        (["bench", "one-batch", "m", "--batch-size", "0"], "--batch-size: must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_a_bad_command_line_is_one_line_and_exit_code_2(argv, message, capsys) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("jserve: error: ")
    assert captured.err.count("\n") == 1


def run_module(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jserve", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_module_runs_and_tells_its_version() -> None:
    assert run_module("--version").stdout == f"jserve {jserve.__version__}\n"


def test_a_server_whose_model_is_not_there_ends_with_code_2_and_one_line() -> None:
    done = run_module("serve", "no/such/model.gguf", "--port", "0")
    assert done.returncode == 2, done.stderr
    (error,) = done.stderr.splitlines()
    assert error.startswith("jserve: error: ") and "no/such/model.gguf" in error


@pytest.fixture
def serve(monkeypatch, capsys):
    """Runs `jserve serve` with these flags, for which no engine may be started; → its one line."""

    def run(*flags: str) -> str:
        assert main(["serve", *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("jserve: error: ") and "listening" not in captured.err
        return captured.err

    monkeypatch.setattr("jserve.server.app._load", lambda config: pytest.fail("it was loaded"))
    return run


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--metrics-prefix", "bad prefix"], "--metrics-prefix must be letters, digits, _ and :"),
        (["--metrics-prefix", "9lives"], "--metrics-prefix"),
        (["--api-key", ""], "--api-key must be a text without blanks around it, got ''"),
        (["--host", ""], "--host"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7 is no address of this machine"),
        (["--kv-events-config", "{"], "--kv-events-config is not JSON"),
        (["--kv-events-config", '{"hvm": 1}'], "did you mean hwm?"),
        (["--radix-eviction-policy-config", "{}"], "--radix-eviction-policy slru"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size must be -1"),
        (["--retraction-policy", "priority"], "needs --enable-priority-scheduling"),
        (["--disable-radix-cache", "--schedule-policy", "lpm"], "--disable-radix-cache"),
        (["--max-total-tokens", "3"], "--page-size"),
        (["--compilation-cache-dir", "/dev/null"], "--compilation-cache-dir /dev/null cannot be"),
        (["--compilation-cache-dir", "/proc/x"], "--compilation-cache-dir /proc/x cannot be used"),
        (["--compilation-cache-dir", f"{__file__}/x"], "name another folder, or off"),
        (["--model-path", "/no/such/model"], "--model-path /no/such/model: no such file or folder"),
        (["--model-path", __file__], "not a checkpoint"),
        (["--chat-template", "/no/such"], "--chat-template /no/such: No such file or directory"),
        (["--chat-template", sys.executable], "no text in UTF-8"),
        (["--chat-template", "{% if %}"], "the chat template, line 1: "),
        (["--load-format", "safetensors"], "--load-format safetensors does not fit"),
    ],
)  # fmt: skip
def test_what_can_be_known_to_be_wrong_is_said_before_the_server_listens(
    serve, flags, named
) -> None:
    assert named in serve("--model-path", "smollm2-135m", "--port", "0", *flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_named_with_what_to_do_before_the_model_is_loaded(serve, host) -> None:
    with listen("::1" if host == "::1" else "127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        error = serve("--model-path", "smollm2-135m", "--host", host, "--port", port)
    assert f"--port {port} is in use at --host {host}" in error and "another --port" in error


def test_a_port_is_held_from_the_start_and_free_when_its_server_has_ended() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is in use"):
            listen("127.0.0.1", port)
        client = socket.create_connection(("127.0.0.1", port), timeout=5)  # nobody accepts yet
        first.accept()[0].close()  # from this side: the address stays in TIME_WAIT
        client.close()
    listen("127.0.0.1", port).close()


def test_the_bare_command_prints_its_help_and_is_an_error(capsys) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage: jserve" in captured.err and "serve" in captured.err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_is_grouped_and_fits_three_screens(command, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert text.count("\n") <= 110
    assert max(map(len, text.splitlines())) <= 100
    for group in ("model: ", "cache: ", "scheduler: ", "execution: "):
        assert f"\n{group}" in text
    assert ("\nserver: " in text) is (command == "serve")
    assert ("\nsampling:" in text) is (command != "serve")


def test_importing_jserve_brings_neither_torch_nor_xgrammar_nor_jax() -> None:
    script = "import jserve, sys; print({'jax', 'torch', 'xgrammar'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n", done.stderr


def test_the_public_names_exist() -> None:
    assert all(jserve.__dict__.get(name) or getattr(jserve, name) for name in jserve.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = jserve.Motor
