"""`jserve bench`: workloads, load, figures and the commands, over scripted engines."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
from fake_engine import continuation
from fake_server_engine import Api, chosen
from grammar_engine import EndingTokenizer

from jserve.__main__ import main
from jserve.bench import commands
from jserve.bench.arrivals import arrival_times
from jserve.bench.compare import Answers, compare_answers
from jserve.bench.load import run_load
from jserve.bench.report import parse_goodput, summarize
from jserve.bench.samples import Sample
from jserve.bench.targets import HttpTarget
from jserve.bench.wire import Asking
from jserve.bench.workload import Turn, WorkloadOptions, make_workload
from jserve.engine.engine import Engine
from jserve.errors import ConfigError


def prompts(**options):
    conversations = make_workload(WorkloadOptions(**options), 5000)
    return [turns[0].new_ids for turns in conversations], conversations


def test_workloads_are_the_same_for_the_same_seed_and_stay_in_the_vocabulary() -> None:
    for name in ("random-ids", "sharegpt-like", "generated-shared-prefix", "multi-turn"):
        one, two, other = (
            prompts(dataset_name=name, num_prompts=20, seed=seed)[1] for seed in (1, 1, 2)
        )
        assert one == two != other
        assert all(0 <= i < 5000 for turns in one for turn in turns for i in turn.new_ids)


def test_random_lengths_keep_their_range() -> None:
    _, conversations = prompts(
        num_prompts=300, random_input_len=100, random_output_len=50, random_range_ratio=0.5
    )
    lengths = [len(turns[0].new_ids) for turns in conversations]
    outputs = [turns[0].max_new_tokens for turns in conversations]
    assert 50 <= min(lengths) < 55 and 95 < max(lengths) <= 100
    assert min(outputs) >= 25 and max(outputs) <= 50


def test_a_group_shares_its_system_prompt_and_nothing_else() -> None:
    sizes = {"gsp_num_groups": 3, "gsp_prompts_per_group": 4, "gsp_system_prompt_len": 64}
    ids, _ = prompts(dataset_name="generated-shared-prefix", gsp_question_len=16, **sizes)
    assert [len(one) for one in ids] == [80] * 12
    systems = [tuple(one[:64]) for one in ids]
    assert sorted(systems.count(one) for one in set(systems)) == [4, 4, 4]
    assert len({tuple(one[64:]) for one in ids}) == 12


def test_arrivals_have_their_rate_and_bursts_have_wider_gaps() -> None:
    assert not arrival_times(5, float("inf"), 1.0, 0).any()
    even, poisson, bursty = (np.diff(arrival_times(20_000, 10.0, b, 0)) for b in (100.0, 1.0, 0.1))
    for gaps in (even, poisson, bursty):
        assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert even.std() < 0.02 < poisson.std() == pytest.approx(0.1, rel=0.05)
    assert bursty.std() > 0.25


def sample(ttft, itls, start=0.0, prompt=10, cached=0, error=""):
    first = start + ttft
    return Sample(
        prompt, start, first, first + sum(itls), len(itls) + 1, list(itls), cached, error=error
    )


def test_figures_are_the_hand_computed_ones() -> None:
    samples = [
        sample(0.1, [0.01, 0.03], cached=4),
        sample(0.3, [0.02] * 4, start=1.0),
        sample(9.0, [], error="HTTP 503"),
    ]
    figures = summarize(samples, 2.0, {"ttft": 200.0, "itl": 50.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["error_messages"] == ["HTTP 503"]
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 8)
    assert figures["output_throughput"] == 4.0
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_itl_ms"] == pytest.approx(20)
    assert figures["mean_tpot_ms"] == pytest.approx(20)
    assert figures["mean_e2e_latency_ms"] == pytest.approx((140 + 380) / 2)
    assert figures["concurrency"] == pytest.approx(0.52 / 2)
    assert figures["cache_report"] == {"cached_tokens": 4, "cache_hit_rate": 0.2}
    assert figures["max_concurrent_requests"] == 1
    assert figures["goodput"] == 0.5  # one request in two seconds kept both limits


def test_a_chunk_of_several_tokens_shares_its_gap() -> None:
    one = Sample(3, start=0.0)
    for count in (1, 1, 4):
        one.arrived(count)
    assert one.output_len == 4 and len(one.itls) == 3
    assert one.itls[0] == one.itls[1] == one.itls[2]
    assert one.latency == pytest.approx(one.ttft + sum(one.itls))


@pytest.mark.parametrize("pair", ["ttft", "ttft:fast", "speed:3"])
def test_a_bad_goodput_limit_is_refused(pair) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([pair])


class CountingTarget:
    """Answers each prompt with the number of its ids; remembers how many were open at a time."""

    knows_ids = True

    def __init__(self, failing=()) -> None:
        self.open = self.most = 0
        self.asked: list[list[int]] = []
        self.failing = failing

    async def ask(self, prompt_ids, max_new_tokens):
        self.open += 1
        self.most = max(self.most, self.open)
        self.asked.append(list(prompt_ids))
        await asyncio.sleep(0.002)
        self.open -= 1
        error = "no" if len(prompt_ids) in self.failing else ""
        return Sample(len(prompt_ids), output_ids=[len(prompt_ids)], error=error)


def test_concurrency_is_bounded_and_conversations_go_on_with_their_answers() -> None:
    turns = (Turn([7], 1), Turn([8, 9], 1))
    target = CountingTarget()
    samples, _ = asyncio.run(run_load(target, [turns] * 6, np.zeros(6), max_concurrency=2))
    assert target.most == 2 and len(samples) == 12
    assert target.asked.count([7]) == target.asked.count([7, 1, 8, 9]) == 6


def test_a_failed_turn_ends_its_conversation_only() -> None:
    target = CountingTarget(failing=(2,))
    conversations = [(Turn([1, 2], 1), Turn([3], 1)), (Turn([1], 1), Turn([3, 4], 1))]
    samples, _ = asyncio.run(run_load(target, conversations, np.zeros(2)))
    assert [one.error for one in samples] == ["no", "", ""]


def ask(protocol, prompt_ids, count, **options):
    async def run():
        transport = httpx.ASGITransport(Api().app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            target = HttpTarget([client], protocol, Asking(model="fake/model", **options))
            return await target.ask(prompt_ids, count)

    return asyncio.run(run())


@pytest.mark.parametrize("protocol", ["native", "openai"])
def test_both_protocols_count_every_token(protocol) -> None:
    got = ask(protocol, [65, 66, 67], 9)
    assert got.error == "" and got.output_len == 9
    assert got.latency >= got.ttft > 0
    if protocol == "native":
        assert got.output_ids == [chosen([65, 66, 67], i) for i in range(9)]


def test_the_clients_of_a_server_take_turns() -> None:
    asked = [0, 0, 0]

    def transport(index: int) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            asked[index] += 1
            return httpx.Response(503, text="no")

        return httpx.MockTransport(answer)

    async def run() -> None:
        clients = [
            httpx.AsyncClient(transport=transport(i), base_url="http://api") for i in range(3)
        ]
        target = HttpTarget(clients, "native")
        await asyncio.gather(*(target.ask([1], 1) for _ in range(7)))

    asyncio.run(run())
    assert sorted(asked) == [2, 2, 3]


@pytest.mark.parametrize("protocol", ["native", "openai"])
def test_a_refused_request_is_a_sample_with_the_servers_words(protocol) -> None:
    got = ask(protocol, [65], 5000)
    assert got.error.startswith("HTTP 400") and got.output_len == 0


def test_answers_may_differ_at_near_ties_only() -> None:
    wanted = [Sample(1, output_ids=[1, 2, 3], margins=[1.0, 0.001, 1.0]) for _ in range(4)]
    got = [Sample(1, output_ids=ids) for ids in ([1, 2, 3], [1, 9, 9], [9, 2, 3], [1, 2])]
    assert compare_answers(wanted, got, 0.01) == Answers(equal=1, ties=1, different=2)


@pytest.fixture
def scripted(monkeypatch):
    """Commands that start an engine get a scripted one."""
    started = []

    def start(config, batch=None):
        started.append(config)
        builder = "grammar_engine:build"
        tokenizer = EndingTokenizer()
        return Engine(config=config, inline=True, builder=builder, tokenizer=tokenizer)  # type: ignore[arg-type]

    monkeypatch.setattr(commands, "_engine", start)
    return started


WORKLOAD = ("--num-prompts", "5", "--random-input-len", "40", "--random-output-len", "6")


def test_offline_prints_one_line_of_json(scripted, capsys, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    assert main(["bench", "offline", "fake", *WORKLOAD, "--output-file", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["successful_requests"] == 5 and result["failed"] == 0
    assert result["total_output_tokens"] > 0 and result["output_throughput"] > 0
    assert json.loads(path.read_text()) == result


def test_one_batch_reports_each_size(scripted, capsys) -> None:
    sizes = ("--batch-size", "1", "3", "--input-len", "20", "--output-len", "5", "--repeat", "1")
    assert main(["bench", "one-batch", "fake", *sizes]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["batch_size"] for line in lines] == [1, 3]
    assert all(line["median_decode_latency"] > 0 for line in lines)
    assert all(line["prefill_throughput"] > 0 for line in lines)


def test_compare_changes_one_mechanism_and_finds_equal_answers(scripted, capsys) -> None:
    shared = ("--dataset-name", "generated-shared-prefix", "--gsp-system-prompt-len", "64")
    sizes = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "3", "--gsp-output-len", "4")
    assert (
        main(
            [
                "bench",
                "compare",
                "fake",
                *shared,
                "--gsp-question-len",
                "8",
                *sizes,
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    plain, radix, grammar = json.loads(capsys.readouterr().out)["arms"]
    assert [arm["name"] for arm in (plain, radix, grammar)] == ["plain", "radix", "grammar"]
    assert plain["equal_answers"] == radix["equal_answers"] == grammar["equal_answers"] == 6
    assert scripted[0].cache.disable_radix_cache and not scripted[1].cache.disable_radix_cache


def test_errors_are_one_line(capsys) -> None:
    nowhere = ("--port", "9", "--ready-check-timeout-sec", "0")
    assert main(["bench", "serving", *nowhere]) == 1
    assert "no server is ready at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["bench", "offline", "fake", "--dataset-name", "tales"]) == 2
    assert "--dataset-name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-prompts", "0"),
        ("--num-prompts", "-1"),
        ("--random-range-ratio", "2"),
        ("--random-input-len", "0"),
        ("--random-output-len", "0"),
        ("--max-concurrency", "0"),
        ("--request-rate", "-1"),
        ("--request-rate", "nan"),
        ("--burstiness", "0"),
        ("--port", "99999"),
        ("--seed", "-1"),
    ],
)
def test_a_load_that_cannot_be_sent_is_refused_by_its_flag_before_anything_is_sent(
    flags, capsys
) -> None:
    assert main(["bench", "serving", *flags]) == 2
    error = capsys.readouterr().err
    assert flags[0] in error and error.count("\n") == 1


def test_scripted_answers_are_what_the_load_sees(scripted) -> None:
    """The fixture's engine really answers: an arm that changed a token would be seen."""
    with commands._engine(scripted_config()) as engine:
        body = engine.generate(input_ids=[104, 105], sampling_params={"max_new_tokens": 4})
    assert body["output_ids"] == continuation([104, 105], 4)


def scripted_config():
    from jserve.config import Config

    return Config.from_flags(model_path="fake", log_level="error")
