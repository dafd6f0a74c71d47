"""`jserve bench serving`, whole commands over the real routes and over servers that misbehave."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest
from fake_server_engine import Api, ByteTokenizer

from jserve.__main__ import main
from jserve.bench import commands
from jserve.bench.arguments import BACKENDS

LOAD = (
    *("--num-prompts", "3", "--random-input-len", "12", "--random-output-len", "4"),
    *("--random-range-ratio", "1", "--vocab-size", "200"),
)


@dataclasses.dataclass
class Served:
    """What reached the server: (path, headers, body)."""

    asked: list[tuple[str, httpx.Headers, dict]]

    def bodies(self, path):
        return [body for one, _, body in self.asked if one == path]


@pytest.fixture
def serve(monkeypatch):
    """serve(transport) is where the benchmark's clients go."""

    def to(transport) -> Served:
        served = Served([])

        async def note(request: httpx.Request) -> None:
            body = json.loads(await request.aread() or b"{}")
            served.asked.append((request.url.path, request.headers, body))

        real = httpx.AsyncClient

        def client(**how):
            how = {**how, "transport": transport, "event_hooks": {"request": [note]}}
            return real(**{name: how[name] for name in how if name not in ("verify", "limits")})

        monkeypatch.setattr(commands.httpx, "AsyncClient", client)
        monkeypatch.setattr(commands, "_CLIENTS", 2)
        return served

    return to


@pytest.fixture
def api(serve):
    return serve(httpx.ASGITransport(Api(enable_cache_report=True).app))


@pytest.fixture
def tokenizer(monkeypatch):
    """The server's tokenizer is on this machine."""
    made = ByteTokenizer()
    monkeypatch.setattr(commands, "find_tokenizer", lambda path, model, info: made)
    return made


def bench(capsys, *flags) -> tuple[int, dict[str, Any], str]:
    """→ exit status, the result line, standard error."""
    code = main(["bench", "serving", *LOAD, *flags])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if lines else {}, captured.err


def whole_server(**routes: tuple[int, str]) -> httpx.MockTransport:
    """Answers one token to each completion; `routes`: other answers by the path's last part."""

    def answer(request: httpx.Request) -> httpx.Response:
        routes.setdefault("server_info", (404, "{}"))
        status, text = routes.get(request.url.path.rpartition("/")[2], (200, ""))
        if request.url.path == "/v1/completions":
            text = 'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'
        return httpx.Response(status, stream=httpx.ByteStream(text.encode("latin-1")))

    return httpx.MockTransport(answer)


#: Names of the result line that every reader of SGLang's files may ask for.
CONTRACT = {
    *("tag", "backend", "dataset_name", "request_rate"),
    *("max_concurrency", "sharegpt_output_len", "random_input_len", "random_output_len"),
    *("random_range_ratio", "server_info", "duration", "completed"),
    *(
        "total_input_tokens",
        "total_input_text_tokens",
        "total_input_vision_tokens",
        "total_output_tokens",
    ),
    *(
        "total_output_tokens_retokenized",
        "request_throughput",
        "input_throughput",
        "output_throughput",
    ),
    *("total_throughput", "concurrency", "accept_length", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "cache_report"),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_has_every_name_of_sglangs_and_true_values(
    backend, api, tokenizer, capsys
) -> None:
    code, result, err = bench(capsys, "--backend", backend, "--output-details")
    assert code == 0, err
    assert set(result) >= CONTRACT | DETAILS
    assert result["total_output_tokens"] == result["total_output_tokens_retokenized"] == 12
    assert result["total_input_text_tokens"] == result["total_input_tokens"] >= 36
    assert result["total_input_vision_tokens"] == 0 and result["sharegpt_output_len"] is None
    assert [len(text) for text in result["generated_texts"]] == [4, 4, 4]
    assert result["errors"] == ["", "", ""] and result["failed"] == 0
    assert result["cache_report"]["cached_tokens"] == 9


def test_errors_are_a_text_a_request_and_only_among_the_details(serve, capsys) -> None:
    serve(whole_server(generate=(503, "no")))
    warm = ("--warmup-requests", "0")
    code, result, err = bench(capsys, *warm, "--output-details")
    assert code == 1 and "3 of 3 requests failed" in err
    assert result["errors"] == ["HTTP 503: no"] * 3 and result["ttfts"] == [0.0] * 3
    code, result, _ = bench(capsys, *warm)
    assert code == 1 and not DETAILS & set(result)


def test_what_nobody_tells_is_null_and_asked_for_is_said(serve, capsys) -> None:
    serve(whole_server())
    code, result, err = bench(capsys, "--backend", "vllm", "--cache-report")
    assert code == 0
    assert result["total_output_tokens_retokenized"] is None and result["cache_report"] is None
    assert "--cache-report: the server does not tell" in err and err.count("\n") == 1


def test_the_flags_of_requests_reach_their_bodies(api, capsys) -> None:
    sampling = ("--temperature", "0.5", "--top-p", "0.9", "--return-logprob", "--disable-stream")
    more = ("--header", "X-Team=a=b", "X-Two=2", "--disable-ignore-eos", "--tokenize-prompt")
    code, result, err = bench(capsys, *sampling, *more)
    assert code == 0, err
    path, headers, body = api.asked[-2]
    assert path == "/generate" and (headers["x-team"], headers["x-two"]) == ("a=b", "2")
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["ignore_eos"]) == (0.5, 0.9, False)
    assert body["return_logprob"] is True and body["stream"] is False
    assert result["total_output_tokens"] == 12
    assert result["mean_ttft_ms"] == result["mean_e2e_latency_ms"] > 0


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat"])
def test_whole_answers_are_counted_by_their_usage(backend, api, tokenizer, capsys) -> None:
    code, result, err = bench(capsys, "--backend", backend, "--disable-stream")
    assert code == 0, err
    assert result["total_output_tokens"] == result["total_output_tokens_retokenized"] == 12


def test_whole_answers_without_usage_are_errors_not_guesses(serve, capsys) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"text": "three words here"}]})

    serve(httpx.MockTransport(answer))
    code, _, err = bench(capsys, "--backend", "vllm", "--disable-stream")
    assert code == 1 and "leave --disable-stream out" in err


def test_tokens_without_text_arrive_with_the_usage(serve, capsys) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.startswith("/v1"):
            return httpx.Response(200, json={})
        text = 'data: {"choices": [{"text": ""}]}\n\ndata: {"usage": {"completion_tokens": 4}}\n\n'
        return httpx.Response(200, stream=httpx.ByteStream(text.encode()))

    serve(httpx.MockTransport(answer))
    code, result, err = bench(capsys, "--backend", "vllm", "--output-details")
    assert code == 0, err
    assert result["output_lens"] == [4, 4, 4] and min(result["ttfts"]) > 0


def test_a_run_is_told_before_its_picture_is_drawn(serve, capsys, monkeypatch, tmp_path) -> None:
    class Canvas:
        def __getattr__(self, name):
            return lambda *args, **options: self

        def subplots(self, *args, **options):
            return self, (self, self, self)

        def savefig(self, path):
            raise OSError(28, "No space left on device")

    serve(whole_server())
    monkeypatch.setattr(commands, "load_pyplot", Canvas)
    path = tmp_path / "results.jsonl"
    files = ("--plot", str(tmp_path / "run.png"), "--output-file", str(path))
    code, result, err = bench(capsys, "--backend", "vllm", *files)
    assert code == 1 and "--plot" in err and "No space left" in err
    assert result["completed"] == 3 and json.loads(path.read_text()) == result


def test_a_full_disk_costs_the_file_not_the_result(serve, capsys) -> None:
    serve(whole_server())
    code, result, err = bench(capsys, "--backend", "vllm", "--output-file", "/dev/full")
    assert code == 1 and result["completed"] == 3
    assert err.startswith("jserve: --output-file /dev/full: No space") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("backend", "route"), [("vllm", "/reset_prefix_cache"), ("jserve-oai", "/flush_cache")]
)
def test_a_server_that_cannot_flush_is_one_line(backend, route, serve, capsys) -> None:
    served = serve(whole_server(**{route.removeprefix("/"): (404, "{}")}))
    code, result, err = bench(capsys, "--backend", backend, "--flush-cache")
    assert code == 1 and not result and route in [path for path, *_ in served.asked]
    assert f"--flush-cache: {route} of http" in err and "answers 404" in err


@pytest.mark.parametrize("said", ["<html>", "[1]", "\udcff"])
def test_a_server_that_says_nothing_of_itself_is_measured_all_the_same(said, serve, capsys) -> None:
    text = said.encode("utf-8", "surrogateescape").decode("latin-1")
    serve(whole_server(server_info=(200, text)))
    code, result, err = bench(capsys, "--backend", "vllm")
    assert code == 0 and result["completed"] == 3
    assert "/server_info is no JSON object" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "name"), [('{"data": [{"id": "org/m"}]}', "org/m"), ("<html>", "default")]
)
def test_a_model_that_is_not_named_is_the_first_that_the_server_lists(
    said, name, serve, capsys
) -> None:
    served = serve(whole_server(models=(200, said)))
    code, _, err = bench(capsys, "--backend", "vllm")
    assert code == 0, err
    assert {body["model"] for body in served.bodies("/v1/completions")} == {name}


def sharegpt(tmp_path, turns, lines=False):
    rows = [{"conversations": [{"value": text} for text in one]} for one in turns]
    path = tmp_path / "chats.json"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return ("--dataset-path", str(path))


@pytest.mark.parametrize("name", ["sharegpt", "custom"])
def test_chats_of_a_file_are_asked_as_they_are(name, api, tokenizer, capsys, tmp_path) -> None:
    turns = [["hello there", "abcd"], ["alone"], ["why?", "because", "oh"], ["x" * 150, "y" * 9]]
    file = sharegpt(tmp_path, turns, lines=name == "custom")
    flags = ("--dataset-name", name, *file, "--sharegpt-context-len", "100")
    code, result, err = bench(capsys, *flags, "--warmup-requests", "0", "--output-details")
    assert code == 0, err
    asked = {tuple(body["input_ids"]) for body in api.bodies("/generate")}
    assert asked == {tuple(tokenizer.encode(text)) for text in ("hello there", "why?")}
    assert sorted(result["output_lens"]) == [5, 8]
    assert "has 2 prompts that fit, fewer than --num-prompts 3" in err
    code, result, _ = bench(capsys, *flags, "--sharegpt-output-len", "6", "--apply-chat-template")
    assert result["total_output_tokens"] == 12 and result["sharegpt_output_len"] == 6
    assert tokenizer.rendered[0][0][0]["role"] == "user"


def test_random_texts_are_cut_or_repeated_to_their_lengths(
    api, tokenizer, capsys, tmp_path
) -> None:
    file = sharegpt(tmp_path, [["abc", "x"], ["a long question, really", "x"], ["", "x"]])
    code, _, err = bench(capsys, "--dataset-name", "random", *file, "--warmup-requests", "0")
    assert code == 0, err
    asked = {bytes(body["input_ids"]) for body in api.bodies("/generate")}
    assert asked == {b"abcabcabcabc", b"a long quest"}


def test_prompts_of_a_group_have_lengths_in_their_range(api, capsys) -> None:
    sizes = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "10", "--gsp-question-len", "40")
    more = ("--gsp-system-prompt-len", "40", "--gsp-output-len", "4", "--gsp-range-ratio", "0.5")
    flags = ("--dataset-name", "generated-shared-prefix", *sizes, *more, "--output-details")
    code, result, err = bench(capsys, *flags)
    assert code == 0, err
    assert len(set(result["input_lens"])) > 5
    assert 40 <= min(result["input_lens"]) <= max(result["input_lens"]) <= 80
    assert set(result["output_lens"]) == {2, 3, 4}
    asked = len(api.asked)
    assert bench(capsys, *flags, "--gsp-ordered", "--max-concurrency", "1")[0] == 0
    prompts = [body["input_ids"] for path, _, body in api.asked[asked:] if path == "/generate"]
    assert len({tuple(ids[:20]) for ids in prompts[1:11]}) == 1  # behind the warm-up


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset-name random", "give --dataset-path FILE, or use --dataset-name random-ids"),
        ("--dataset-name sharegpt", "or use --dataset-name sharegpt-like"),
        ("--dataset-name mmmu", "mmmu is not supported: prompts are text only"),
        ("--dataset-name tales", "invalid choice: 'tales'; one of random-ids"),
        ("--dataset-path /dev/null", "--dataset-path is for --dataset-name sharegpt"),
        ("--dataset-name custom --dataset-path /no/f", "--dataset-path: /no/f: No such file"),
        ("--apply-chat-template", "--apply-chat-template is for --dataset-name sharegpt, custom"),
        ("--sharegpt-output-len 3", "--sharegpt-output-len must be >= 4"),
        ("--gsp-range-ratio 2", "--gsp-range-ratio must be in [0, 1]"),
        ("--backend lmdeploy", "lmdeploy is not supported: use vllm"),
        ("--backend gpt", "invalid choice: 'gpt'; one of jserve"),
        ("--profile", "--profile is not supported: read the server's /metrics"),
        ("--lora-name a b", "--lora-name is not supported: name one adapter"),
        ("--gsp-num-turns 3", "use --dataset-name multi-turn"),
        ("--return-logprob --backend vllm", "put logprobs into --extra-request-body"),
        ("--tokenize-prompt --backend sglang-oai-chat", "--tokenize-prompt does not go with"),
        ("--header X", "wants NAME=VALUE, got 'X'"),
        ("--header X=é", "must be printable ASCII"),
        ("--api-key é", "--api-key: must be printable ASCII"),
        ("--temperature nan", "--temperature: must be >= 0"),
        ("--top-p 0", "--top-p: must be in (0, 1]"),
        ("--base-url http://x:y", "--base-url http://x:y: Invalid port"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_with_what_to_use(flags, message, capsys) -> None:
    assert main(["bench", "serving", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("jserve: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "--dataset-path"),
        ("{}", "a JSON array of conversations is wanted"),
        ("[3]", "conversation 0 is not like"),
        ('[{"conversations": [{"value": 1}, {"value": 2}]}]', "conversation 0 is not like"),
        ("[]", "no conversation of two turns"),
    ],
)
def test_a_file_that_is_not_of_chats_is_refused(
    text, message, api, tokenizer, capsys, tmp_path
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
    code, _, err = bench(capsys, *flags)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", ["--dataset-name custom", "--backend sglang-oai-chat"])
def test_texts_without_a_tokenizer_ask_for_one(flags, api, capsys, tmp_path) -> None:
    file = sharegpt(tmp_path, [["hello", "you"]], lines=True) if "custom" in flags else ()
    code, _, err = bench(capsys, *flags.split(), *file)
    assert code == 2 and "give --tokenizer PATH" in err and api.bodies("/generate") == []
