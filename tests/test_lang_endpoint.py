"""Programs over HTTP on a stand-in for SGLang's server: what is asked, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from native_server import NativeServer, answer_of, logprob, running

import jserve.lang as sgl
from jserve.errors import RequestError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]


@pytest.fixture(scope="module")
def served():
    server = NativeServer()
    with running(server.app) as url:
        yield server, url


@pytest.fixture
def server(served):
    served[0].requests.clear()
    served[0].seen.clear()
    return served[0]


@pytest.fixture
def backend(served, server):
    one = sgl.RuntimeEndpoint(served[1])
    yield one
    one.shutdown()


def test_a_generation_sends_sglangs_fields_and_nothing_that_was_not_said(server, backend):
    @sgl.function
    def program(s):
        s += "Q: why? A:"
        s += sgl.gen("a", max_tokens=5, stop="\n", regex="[a-z]+", min_tokens=2)

    state = program.run(backend=backend, temperature=0.5, top_k=7)
    assert state["a"] == answer_of("Q: why? A:", 5)
    assert server.requests == [
        {
            "text": "Q: why? A:",
            "sampling_params": {
                "max_new_tokens": 5,
                "min_new_tokens": 2,
                "n": 1,
                "temperature": 0.5,
                "top_p": 1.0,
                "top_k": 7,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "ignore_eos": False,
                "stop": ["\n"],
                "stop_token_ids": [],
                "stop_regex": [],
                "regex": "[a-z]+",
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
            },
        }
    ]
    assert state.get_meta_info("a")["finish_reason"]["type"] == "length"


def test_log_probabilities_are_asked_for_by_their_names(server, backend):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen(
            "a",
            max_tokens=2,
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=3,
            return_text_in_logprobs=True,
        )

    meta = program.run(backend=backend).get_meta_info("a")
    asked = server.requests[0]
    assert (asked["return_logprob"], asked["logprob_start_len"]) == (True, 1)
    assert (asked["top_logprobs_num"], asked["return_text_in_logprobs"]) == (3, True)
    assert len(meta["output_token_logprobs"]) == 2 and meta["input_token_logprobs"][0][2] == "b"


def test_a_stream_comes_in_deltas_with_log_probabilities_of_what_is_new(server, backend):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("a", max_tokens=7, return_logprob=True)

    async def read():
        state = program.run(backend=backend, stream=True)
        return [piece async for piece in state.text_async_iter("a", return_meta_data=True)]

    pieces = asyncio.run(read())
    assert "".join(text for text, _ in pieces) == answer_of("ab", 7)
    entries = [entry for _, meta in pieces for entry in meta["output_token_logprobs"]]
    assert [chr(entry[1]) for entry in entries] == list(answer_of("ab", 7))
    assert server.requests[0]["stream"] is True


@pytest.mark.parametrize("method", ["token", "greedy", "unconditional"])
def test_select_scores_every_choice_behind_the_prompt(server, backend, method):
    methods = {
        "token": sgl.token_length_normalized,
        "greedy": sgl.greedy_token_selection,
        "unconditional": sgl.unconditional_likelihood_normalized,
    }
    choices = ["yes", "no", "maybe"]

    @sgl.function
    def program(s):
        s += "Is it so? " + sgl.select("x", choices, choices_method=methods[method])

    state = program.run(backend=backend)
    prompt = "Is it so? "
    first, scoring, *alone = server.requests
    assert first == {"text": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
    start = len(prompt) - 2
    assert scoring == {
        "text": [prompt + choice for choice in choices],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": start,
    }
    meta = state.get_meta_info("x")
    rows = []
    for choice in choices:
        ids = list((prompt + choice).encode())
        rows.append([logprob(ids, i) for i in range(start, len(ids))])
    assert [[entry[0] for entry in row] for row in meta["input_token_logprobs"]] == rows
    means = [sum(row) / len(row) for row in rows]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(means)
    if method == "token":
        assert state["x"] == choices[means.index(max(means))]
    if method == "unconditional":
        tails = [list(("? " + choice).encode()) for choice in choices]
        same = {name: value for name, value in scoring.items() if name != "text"}
        assert alone == [same | {"input_ids": tails, "logprob_start_len": 0}]
        lone = [[logprob(ids, i) or 0.0 for i in range(len(ids))] for ids in tails]
        gains = [
            sum(a - b for a, b in zip(row, free, strict=True)) / len(row)
            for row, free in zip(rows, lone, strict=True)
        ]
        assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(gains)
        assert state["x"] == choices[gains.index(max(gains))]
    else:
        assert alone == []


def test_a_prompt_of_one_token_is_scored_from_its_beginning(server, backend):
    @sgl.function
    def program(s):
        s += "a" + sgl.select("x", ["b", "cd"])

    state = program.run(backend=backend)
    assert server.requests[1]["logprob_start_len"] == 0
    tokens = state.get_meta_info("x")["input_token_logprobs"]
    assert [[entry[2] for entry in row] for row in tokens] == [["b"], ["c", "d"]]  # healed


def test_select_at_a_temperature_is_refused(server, backend):
    @sgl.function
    def program(s):
        s += "a" + sgl.select("x", ["b", "c"], temperature=0.5)

    assert "select needs temperature 0, got 0.5" in str(program.run(backend=backend).error())


def test_a_fork_prefills_once_and_the_usage_shows_the_reuse(server, backend):
    @sgl.function
    def program(s):
        s += "A long introduction that two branches share. "
        branches = s.fork(2)
        branches += ["one", "two"]
        branches += sgl.gen("x", max_tokens=3)
        branches.join()

    state = program.run(backend=backend)
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 0
    assert server.requests[0]["text"] == "A long introduction that two branches share. "
    shared = len(server.requests[0]["text"])
    assert state.usage.cached_tokens >= 2 * shared
    assert state.usage.computed_tokens <= shared + 2 * 3 + 1


def test_a_refusal_is_told_with_the_servers_words_and_the_line(server, backend):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", top_p=2)

    with pytest.raises(sgl.ProgramError, match=r"test_lang_endpoint.py:\d+, in program") as caught:
        _ = program.run(backend=backend)["x"]
    assert "POST /generate → 400: top_p must be in (0, 1], got 2." in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_aborted_or_broke_off_is_an_error(server, backend, stream):
    @sgl.function
    def program(s, word):
        s += word + sgl.gen("x", max_tokens=6)

    aborted = program.run("abort", backend=backend, stream=stream)
    assert "the request was aborted: out of memory" in str(aborted.error())
    if stream:
        broken = program.run("break", backend=backend, stream=True)
        assert "lost the device" in str(broken.error())


def test_cancelling_closes_the_connection(server, backend):
    held = []

    @sgl.function
    def program(s):
        held.append(s)
        s += "hang" + sgl.gen("x")
        return s["x"]

    def run():
        with pytest.raises(sgl.ProgramCancelled):
            program.run(backend=backend)

    server.left = 0
    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: server.requests)
    held[0].cancel()
    thread.join(5)
    assert not thread.is_alive()
    wait_for(lambda: server.left == 1)


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_server_that_hides_its_template_gets_the_one_its_name_suggests(served, server, backend):
    """It ignores add_generation_prompt, so its /tokenize does not say where messages end."""

    @sgl.function
    def program(s):
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("a", max_tokens=2))

    state = program.run(backend=backend)
    assert state.text().startswith("USER:Hi\nASSISTANT:")
    named = sgl.RuntimeEndpoint(served[1], chat_template_name="chatml")
    assert program.run(backend=named).text().startswith("<|im_start|>user\nHi<|im_end|>\n")
    assert server.requests[-1]["sampling_params"]["stop"] == ["<|im_end|>"]
    named.shutdown()


def test_facts_and_the_cache_are_the_servers(server, backend):
    assert backend.get_model_name() == "stand/in-chat"
    assert sgl.get_server_info(backend)["version"] == "stand-in"
    backend.cache_prefix("abc")
    assert server.seen == ["abc"]
    assert sgl.flush_cache(backend) and server.seen == []


def test_a_key_is_sent(served):
    server = NativeServer(key="secret")

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", max_tokens=2)

    with running(server.app) as url:
        for key, good in (("secret", True), ("wrong", False), (None, False)):
            backend = sgl.RuntimeEndpoint(url, api_key=key)
            state = program.run(backend=backend)
            assert (state.error() is None) is good
            assert good or "401: wrong key" in str(state.error())
            backend.shutdown()


def test_where_nobody_serves_the_endpoint_says_so():
    with pytest.raises(sgl.BackendError, match="GET /get_model_info at http://127.0.0.1:9: "):
        sgl.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(sgl.ExpressionError, match="no chat template is called"):
        sgl.RuntimeEndpoint("http://127.0.0.1:9", chat_template_name="nonsense")


def test_n_answers_come_as_a_list(server, backend):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("x", n=2, max_tokens=2)

    assert program.run(backend=backend)["x"] == [answer_of("ab", 2)] * 2


def test_the_stand_in_itself_speaks_the_contract(served):
    with httpx.stream(
        "POST",
        f"{served[1]}/generate",
        json={"text": "x", "sampling_params": {"max_new_tokens": 4}, "stream": True},
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) == 3


@pytest.mark.parametrize(
    "given", [None, 5, "", "127.0.0.1:30000", "ftp://a", "http://", "http://a:b"]
)
def test_what_is_no_address_is_told_before_anything_is_asked(given):
    with pytest.raises(sgl.ExpressionError, match="base_url must be a server's address such as ht"):
        sgl.RuntimeEndpoint(given)


def test_a_wrong_path_is_a_refusal_of_the_server(served):
    with pytest.raises(sgl.RefusedError, match="GET /get_model_info → 404"):
        sgl.RuntimeEndpoint(f"{served[1]}/v1")
    assert issubclass(sgl.RefusedError, sgl.BackendError)


def test_a_backend_that_is_shut_down_twice_was_shut_down_once(served):
    before = set(threading.enumerate())
    for backend in (sgl.RuntimeEndpoint(served[1]), sgl.OpenAI("m"), sgl.TestBackend()):
        backend.shutdown()
        backend.shutdown()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("temperature", float("nan"), "Out of range float"),
        ("logit_bias", {1: float("inf")}, "Out of range float"),
        ("top_p", object(), "not JSON serializable"),
    ],
)
def test_what_json_cannot_say_names_its_parameter(server, backend, name, value, why, stream):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", **{name: value})

    api = sgl.OpenAI("m", False, base_url=backend.base_url)
    for one in (backend, api):
        with pytest.raises(sgl.ProgramError, match=rf"{name} cannot be sent: .*{why}") as caught:
            _ = program.run(backend=one, stream=stream)["x"]
        assert isinstance(caught.value.__cause__, RequestError)
        assert caught.value.__cause__.param == name
    assert server.requests == []
    api.shutdown()
