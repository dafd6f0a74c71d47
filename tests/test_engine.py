"""The engine from outside, over a scripted runner: requests, streams, stop strings, Python API."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import CONTEXT, VOCAB, ByteTokenizer, continuation

from jserve.config import Config
from jserve.engine.engine import Engine, render_output, sampling_from_dict
from jserve.engine.ranges import check_ranges
from jserve.engine.requests import expand
from jserve.errors import ConfigError, EngineDeadError, RequestError, WeightError
from jserve.types import (
    Abort,
    GenerateRequest,
    LogprobParams,
    Output,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Transcript,
)


def start(builder: str = "build", inline: bool = True, **flags: Any) -> Engine:
    return Engine(
        model_path="fake",
        inline=inline,
        builder=f"fake_engine:{builder}",
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        **flags,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as engine:
        yield engine


def text_of(prompt: str, count: int) -> str:
    return bytes(continuation(list(prompt.encode()), count)).decode()


def request(prompt: str = "hello", stream: bool = True, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 12} | sampling)
    return GenerateRequest(text=prompt, stream=stream, sampling=params)


async def collect(engine: Engine, req: GenerateRequest) -> list[Output]:
    async with contextlib.aclosing(engine.generate_stream(req)) as outputs:
        return [output async for output in outputs]


def test_generate_answers_in_sglangs_shape(engine: Engine) -> None:
    body = engine.generate("hello", {"temperature": 0, "max_new_tokens": 12})
    assert body["text"] == text_of("hello", 12)
    assert body["output_ids"] == continuation(list(b"hello"), 12)
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 12)
    assert meta["e2e_latency"] > 0 and meta["num_retractions"] == 0 and meta["id"]
    assert {"cached_tokens", "weight_version", "reasoning_tokens"} <= meta.keys()


def test_a_batch_answers_in_order_and_broadcasts_scalars(engine: Engine) -> None:
    prompts = [f"prompt number {i}" for i in range(20)]
    params = [{"max_new_tokens": 1 + i, "temperature": 0} for i in range(20)]
    bodies = engine.generate(prompts, params, rid="batch")
    assert [body["text"] for body in bodies] == [text_of(p, 1 + i) for i, p in enumerate(prompts)]
    assert [body["meta_info"]["id"] for body in bodies] == [f"batch_{i}" for i in range(20)]
    ids = engine.generate(input_ids=[[1, 2], [3, 4]], sampling_params={"max_new_tokens": 3})
    assert [body["output_ids"] for body in ids] == [
        continuation([1, 2], 3),
        continuation([3, 4], 3),
    ]


def test_a_stream_is_cumulative_and_ends_with_the_finish(engine: Engine) -> None:
    chunks = list(engine.generate("hello", {"max_new_tokens": 6}, stream=True))
    whole = text_of("hello", 6)
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 6  # late, a chunk has several tokens
    assert [chunk["text"] for chunk in chunks] == [whole[:length] for length in lengths]
    assert not any(chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1])
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_streamed_batch_says_whose_chunk_it_is(engine: Engine) -> None:
    last: dict[int, str] = {}
    for chunk in engine.generate(["ab", "cd"], {"max_new_tokens": 4, "n": 2}, stream=True):
        last[chunk["index"]] = chunk["text"]
    assert last == {
        0: text_of("ab", 4),
        1: text_of("ab", 4),
        2: text_of("cd", 4),
        3: text_of("cd", 4),
    }


def test_stream_interval_holds_tokens_back_but_never_the_first_or_the_last(engine: Engine) -> None:
    outputs = asyncio.run(collect(engine, request(stream_interval=5)))
    counts = [output.completion_tokens for output in outputs]
    assert counts[-1] == 12 and outputs[-1].finish is not None
    assert counts[0] < 12, "the first was held back"
    assert all(later - one >= 5 for one, later in itertools.pairwise(counts[:-1]))
    assert "".join(output.delta for output in outputs) == text_of("hello", 12)
    assert [i for o in outputs for i in o.new_ids] == continuation(list(b"hello"), 12)


def test_async_generate_serves_several_event_loops_at_once(engine: Engine) -> None:
    results: dict[str, Any] = {}

    async def both(name: str) -> None:
        stream = await engine.async_generate(name, {"max_new_tokens": 30}, stream=True)
        whole, *chunks = await asyncio.gather(
            engine.async_generate(name, {"max_new_tokens": 30}), anext(stream)
        )
        async for chunk in stream:
            chunks.append(chunk)
        results[name] = (whole["text"], chunks[-1]["text"])

    threads = [
        threading.Thread(target=asyncio.run, args=(both(name),)) for name in ("one", "two", "three")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {name: (text_of(name, 30),) * 2 for name in ("one", "two", "three")}


def test_a_stop_string_beats_the_length_and_is_trimmed(engine: Engine, sent: list[Any]) -> None:
    whole = text_of("hello", 12)
    stop = whole[9:12]  # complete with the very last token that max_new_tokens allows
    body = engine.generate("hello", {"max_new_tokens": 12, "stop": stop})
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert body["text"] == whole[: whole.index(stop)]
    assert not [m for m in sent if isinstance(m, Abort)]  # the engine had finished by itself
    kept = engine.generate("hello", {"max_new_tokens": 12, "stop": [stop], "no_stop_trim": True})
    assert kept["text"] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_middle_ends_the_request_in_the_engine(
    engine: Engine, sent: list[Any], stream: bool
) -> None:
    whole = text_of("hello", 300)
    stop = whole[4:6]
    cut = whole.index(stop)
    outputs = asyncio.run(collect(engine, request(stream=stream, max_new_tokens=300, stop=(stop,))))
    assert outputs[-1].text == whole[:cut] == "".join(output.delta for output in outputs)
    assert outputs[-1].completion_tokens == len(outputs[-1].output_ids) == cut + 2
    aborts = [m for m in sent if isinstance(m, Abort)]
    assert [(m.rid, m.stopped, m.exact) for m in aborts] == [(outputs[-1].rid, True, True)]
    assert outputs[-1].finish is not None and outputs[-1].finish.matched == stop
    wait_idle(engine)


def test_an_id_used_again_at_once_gets_no_token_of_the_request_before(engine: Engine) -> None:
    async def both() -> list[str]:
        texts = []
        for prompt in ("hello", "world") * 30:  # the engine is ahead by a token or two
            stop = text_of(prompt, 2)[1]
            body = await engine.async_generate(
                prompt, {"max_new_tokens": 300, "stop": stop, "temperature": 0}, rid="again"
            )
            texts.append(body["text"])
        return texts

    assert asyncio.run(both()) == [text_of("hello", 1), text_of("world", 1)] * 30
    wait_idle(engine)


def test_a_stop_token_is_counted_and_its_text_is_trimmed(engine: Engine) -> None:
    ids = continuation(list(b"hello"), 12)
    stop = ids[5]
    first = ids.index(stop)
    body = engine.generate("hello", {"max_new_tokens": 12, "stop_token_ids": [stop]})
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert body["output_ids"] == ids[: first + 1]
    assert body["text"] == bytes(ids[:first]).decode()


def test_n_warms_a_long_prompt_once_and_gives_every_sequence_its_own_seed(
    engine: Engine, sent: list[Any]
) -> None:
    prompt = "x" * 100
    bodies = engine.generate(prompt, {"max_new_tokens": 4, "n": 3, "sampling_seed": 2**63 - 1})
    assert [body["text"] for body in bodies] == [text_of(prompt, 4)] * 3
    submits = [m for m in sent if isinstance(m, Submit)]
    assert [s.sampling.max_new_tokens for s in submits] == [0, 4, 4, 4]
    seeds = [s.sampling.sampling_seed for s in submits[1:]]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert all(s.sampling.n == 1 for s in submits) and len({s.rid for s in submits}) == 4
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [96] * 3


def test_closing_a_stream_aborts_the_request_and_frees_its_pages(
    engine: Engine, sent: list[Any]
) -> None:
    async def leave() -> None:
        async with contextlib.aclosing(engine.generate_stream(request(max_new_tokens=400))) as outs:
            await anext(outs)

    asyncio.run(leave())
    aborts = [m for m in sent if isinstance(m, Abort)]
    assert len(aborts) == 1 and not aborts[0].stopped
    wait_idle(engine)

    async def cancelled() -> None:
        task = asyncio.create_task(collect(engine, request(max_new_tokens=400)))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len([m for m in sent if isinstance(m, Abort)]) == 2
    wait_idle(engine)


def test_leaving_a_synchronous_stream_aborts_it_too(engine: Engine) -> None:
    for _ in engine.generate("hello", {"max_new_tokens": 400}, stream=True):
        break
    wait_idle(engine)


def test_abort_by_prefix_is_an_answer_and_not_an_error(engine: Engine) -> None:
    threading.Timer(0.1, engine.abort, ("session",)).start()
    body = engine.generate("hello", {"max_new_tokens": 450}, rid="session-7")
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert body["meta_info"]["finish_reason"]["status_code"] is None
    assert 0 < len(body["output_ids"]) < 450


def test_a_closed_event_loop_does_not_keep_its_requests_alive(engine: Engine) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.generate_stream(request(max_new_tokens=450))
    loop.run_until_complete(anext(stream))
    loop.close()
    wait_idle(engine)


def wait_idle(engine: Engine) -> None:
    """Flush succeeds only when no request is left in the engine."""
    deadline = time.monotonic() + 2
    while not engine.flush_cache():
        assert time.monotonic() < deadline, "a request is still running"
        time.sleep(0.01)
    assert not engine._client.routes


BAD = [
    ({"prompt": ""}, "text"),
    ({"prompt": "a", "input_ids": [1]}, "prompt"),
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 7}, "text"),
    ({"input_ids": [VOCAB]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"prompt": "x" * CONTEXT}, "text"),
    ({"prompt": "x" * (CONTEXT - 5), "sampling_params": {"max_new_tokens": 6}}, "max_new_tokens"),
    ({"prompt": "a", "sampling_params": {"top_p": 2.0}}, "top_p"),
    ({"prompt": "a", "sampling_params": {"top_p": "x"}}, "top_p"),
    ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, "temperature"),
    ({"prompt": "a", "sampling_params": {"n": True}}, "n"),
    ({"prompt": "a", "sampling_params": {"stop": ["", "b"]}}, "stop"),
    ({"prompt": "a", "sampling_params": {"stop": [3]}}, "stop"),
    ({"prompt": "a", "sampling_params": {"stop": ["b", "x" * 4097]}}, "stop"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
    ({"prompt": "a", "sampling_params": {"top_q": 0.5}}, "top_q"),
    ({"prompt": "a", "sampling_params": {"regex": "a+", "ebnf": "x"}}, "ebnf"),
    ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"prompt": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"prompt": ["a", "b"], "return_logprob": [True, 1]}, "return_logprob"),
    ({"prompt": "a", "return_logprob": "false"}, "return_logprob"),
    ({"prompt": "a", "return_logprob": 1}, "return_logprob"),
    ({"prompt": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"prompt": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"prompt": "a", "return_logprob": True, "token_ids_logprob": [999]}, "token_ids_logprob"),
    ({"prompt": "a", "top_logprobs_num": 5}, "top_logprobs_num"),
    ({"prompt": "a", "token_ids_logprob": [3]}, "token_ids_logprob"),
    ({"prompt": "a", "logprob_start_len": 0}, "logprob_start_len"),
    (
        {"prompt": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [0, 5]},
        "top_logprobs_num",
    ),
    ({"prompt": ["a", "b"], "token_ids_logprob": [[], [3]]}, "token_ids_logprob"),
    ({"prompt": ["a", "b"], "logprob_start_len": [-1, 0]}, "logprob_start_len"),
    ({"prompt": "a", "rid": 5}, "rid"),
    ({"prompt": "\udcff"}, "text"),
    ({"prompt": "a", "rid": "\ud800"}, "rid"),
    ({"prompt": "a", "extra_key": "\ud800"}, "extra_key"),
    ({"prompt": ["a", "b"], "cache_salt": ["", "\ud800"]}, "cache_salt"),
    ({"prompt": "a", "sampling_params": {"stop": ["b", "\ud800"]}}, "stop"),
    ({"prompt": "a", "sampling_params": {"stop_regex": "\ud800"}}, "stop_regex"),
    ({"prompt": "a", "sampling_params": {"regex": "a\ud800"}}, "regex"),
]


@pytest.mark.parametrize(("arguments", "field"), BAD)
def test_a_bad_request_names_its_field_and_the_next_one_is_answered(
    engine: Engine, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        engine.generate(**arguments)
    assert caught.value.param == field
    assert engine.generate("a", {"max_new_tokens": 1})["text"] == text_of("a", 1)


def test_sampling_parameters_take_nulls_and_single_stop_strings() -> None:
    assert sampling_from_dict(None) == SamplingParams()
    given = {"top_p": None, "stop": "x", "logit_bias": {"3": 1}, "regex": None, "temperature": 1}
    assert sampling_from_dict(given) == SamplingParams(stop=("x",), logit_bias={3: 1.0})
    assert sampling_from_dict({"max_new_tokens": None}).max_new_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 2**31),
        ("max_new_tokens", -1),
        ("min_new_tokens", 2**31),
        ("min_new_tokens", 2**63),
        ("min_new_tokens", -1),
        ("stream_interval", 2**31),
        ("stream_interval", 0),
        ("top_k", 2**30 + 1),
        ("n", 2**31),
        ("sampling_seed", 2**63),
        ("stop_token_ids", [2**31]),
        ("temperature", 1e300),
        ("logit_bias", {"3": 1e31}),
        ("logit_bias", {"3": float("-inf")}),
        ("logit_bias", {"3": float("nan")}),
        ("logit_bias", {str(2**31): 1.0}),
    ],
)
def test_numbers_that_the_device_cannot_hold_are_refused_by_name(
    engine: Engine, field: str, value: Any
) -> None:
    params = {"max_new_tokens": None, field: value}
    with pytest.raises(RequestError, match=f"^{field} must be") as caught:
        engine.generate("a", params)
    assert caught.value.param == field


def test_the_largest_numbers_are_taken() -> None:
    most = {"max_new_tokens": None, "min_new_tokens": 2**31 - 1, "stream_interval": 2**31 - 1}
    params = sampling_from_dict({**most, "logit_bias": {"3": -1e30}, "top_k": 2**30})
    check_ranges(params, VOCAB)


@pytest.mark.parametrize(("length", "inside"), [(32 * 1024, True), (32 * 1024 + 1, False)])
def test_a_very_long_text_is_tokenized_off_the_event_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, length: int, inside: bool
) -> None:
    threads: list[threading.Thread] = []

    def encode(text: str, add_special: bool) -> list[int]:
        threads.append(threading.current_thread())
        return list(text[:3].encode())

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    monkeypatch.setattr(engine.tokenizer, "longest_token", 100)
    outputs = asyncio.run(collect(engine, request("x" * length)))
    assert outputs[-1].text == text_of("xxx", 12)
    assert (threads == [threading.current_thread()]) is inside


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(RequestError, match="1025 characters") as caught:
        asyncio.run(collect(engine, request("x" * 1025)))
    assert caught.value.param == "text"


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine: Engine) -> None:
    async def twice() -> None:
        req = GenerateRequest(text="a", rid="same", sampling=SamplingParams(max_new_tokens=50))
        first = asyncio.create_task(collect(engine, req))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="same"):
            await collect(engine, req)
        assert len((await first)[0].output_ids) == 50
        assert len((await collect(engine, req))[0].output_ids) == 50

    asyncio.run(twice())


def test_prompt_logprobs_are_meant_when_no_output_is_asked_for(
    engine: Engine, sent: list[Any]
) -> None:
    engine.generate("abc", {"max_new_tokens": 0}, return_logprob=True)
    engine.generate("abc", {"max_new_tokens": 1}, return_logprob=False)
    starts = [m.logprobs and m.logprobs.start_len for m in sent if isinstance(m, Submit)]
    assert starts == [0, None]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_cumulative_and_end_with_the_stop_string(engine: Engine, stream: bool) -> None:
    ids = continuation(list(b"abc"), 12)
    whole = bytes(ids).decode()
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    params = {"max_new_tokens": 12, "stop": whole[6:8]}
    used = whole.index(params["stop"]) + 2
    answer = engine.generate("abc", params, **options, token_ids_logprob=[7], stream=stream)
    body = list(answer)[-1] if stream else answer
    meta = body["meta_info"]
    assert meta["output_token_logprobs_length"] == used == len(body["output_ids"])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids[:used]
    assert meta["output_token_logprobs"][0] == [pytest.approx(-ids[0] / 1000), ids[0], None]
    assert [[e[1] for e in row] for row in meta["output_top_logprobs"]] == [
        [token, token + 1] for token in ids[:used]
    ]
    assert len(meta["output_token_ids_logprobs"]) == used
    assert [entry[1] for entry in meta["input_token_logprobs"]] == list(b"abc")
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_token_logprobs"][1][0] == pytest.approx(-0.098)


def test_one_value_for_all_prompts_says_what_those_want_that_want_logprobs() -> None:
    def wanted(**options: Any) -> list[Any]:
        return [one.logprobs for one in expand(["a", "b", "c"], **options)[0]]

    some = {"return_logprob": [True, False, True]}
    two, all_ = LogprobParams(top_num=2, token_ids=(7,)), LogprobParams()
    assert wanted(**some, top_logprobs_num=2, token_ids_logprob=[7]) == [two, None, two]
    assert wanted(**some, top_logprobs_num=[2, 0, 2], token_ids_logprob=[[7], [], [7]]) == [
        two,
        None,
        two,
    ]
    assert wanted(return_logprob=True) == [all_] * 3
    for nothing in (None, -1, [-1, -1, None]):
        assert wanted(logprob_start_len=nothing, top_logprobs_num=0) == [None] * 3
        assert wanted(**some, logprob_start_len=nothing) == [all_, None, all_]


def test_logprobs_are_rendered_as_sglangs_triples() -> None:
    said = Transcript(
        ids=[98],
        text=io.StringIO("b"),
        logprobs=TokenLogprobs(
            token_ids=[98], values=[-0.5], top=[[(-0.5, 98), (-1.0, 99)]], ids=[[-3.0]]
        ),
        input_logprobs=TokenLogprobs(
            token_ids=[97, 98], values=[None, -2.0], top=[None, [(-1.0, 97)]], ids=[None, [-4.0]]
        ),
    )
    output = Output(
        index=0,
        rid="r",
        transcript=said,
        text_len=1,
        delta="b",
        new_ids=[98],
        finish=None,
        prompt_tokens=2,
        completion_tokens=1,
        cached_tokens=0,
    )
    wanted = LogprobParams(start_len=0, top_num=2, token_ids=(65,))
    req = GenerateRequest(
        sampling=SamplingParams(), text="ab", logprobs=wanted, return_text_in_logprobs=True
    )
    meta = render_output(output, req, chr)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-2.0, 98, "b"]]
    assert meta["output_token_logprobs"] == [[-0.5, 98, "b"]]
    assert meta["output_token_logprobs_length"] == 1
    assert meta["input_top_logprobs"] == [None, [[-1.0, 97, "a"]]]
    assert meta["output_top_logprobs"] == [[[-0.5, 98, "b"], [-1.0, 99, "c"]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-4.0, 65, "A"]]]
    assert meta["output_token_ids_logprobs"] == [[[-3.0, 65, "A"]]]
    plain = GenerateRequest(sampling=SamplingParams(), text="ab")
    rest = {name: value for name, value in meta.items() if "logprobs" not in name}
    assert render_output(output, plain, chr)["meta_info"] == rest and rest["id"] == "r"


def test_metrics_count_tokens_and_latencies_and_pass_gauges_on() -> None:
    with start(enable_metrics=True, served_model_name="m") as engine:
        list(engine.generate("hello", {"max_new_tokens": 30}, stream=True))
        body = engine.generate("hello", {"max_new_tokens": 4})
        assert body["meta_info"]["queue_time"] >= 0
        assert body["meta_info"]["first_token_latency"] > 0
        assert 0 < body["meta_info"]["decode_throughput"] < 10_000
        one = engine.generate("hello", {"max_new_tokens": 1})["meta_info"]
        assert one["completion_tokens"] == 1 and "decode_throughput" not in one
        deadline = time.monotonic() + 3
        while "token_usage" not in engine.gauges and time.monotonic() < deadline:
            time.sleep(0.02)
        text = engine.metrics.render().decode()
    request = 'engine_type="unified",model_name="m"'
    labels = 'engine_type="unified",is_streaming="true",model_name="m"'
    for line in (
        f"jserve:generation_tokens_total{{{labels}}} 30.0",
        f"jserve:prompt_tokens_total{{{labels}}} 5.0",
        f"jserve:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"jserve:inter_token_latency_seconds_count{{{request}}} 29.0",
        f"jserve:e2e_request_latency_seconds_count{{{labels}}} 1.0",
    ):
        assert line in text
    assert "jserve:num_running_reqs{" in text and "jserve:recompiles_total{" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_start_up_errors_are_raised_by_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="tensor lm_head"):
        start("build_refused")
    with pytest.raises(EngineDeadError, match="has no attribute 'nothing'"):
        start("nothing")
    with pytest.raises(ConfigError, match="no/such/folder"):
        Engine(model_path="no/such/folder", inline=True, builder="fake_engine:build")
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    with pytest.raises(ConfigError, match="FooForCausalLM is not supported; known: Llama"):
        Engine(model_path=str(tmp_path), inline=True, builder="fake_engine:build")
    whole = Config.from_flags(model_path="m")
    with pytest.raises(ConfigError, match="without it: model_path, nonsense, page_size"):
        Engine("other", config=whole, page_size=7, nonsense=True)
    with pytest.raises(ConfigError, match="nonsense"):
        start(nonsense=1)
