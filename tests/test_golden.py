"""SmolLM2-135M answers over HTTP as its reference does, whatever path its tokens take through the
engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import httpx
import pytest

from tests.golden import Case, check_free_running, check_logprobs, load_cases
from tests.server_process import serving

MODEL = ("--model-path", "smollm2-135m", "--enable-metrics")
SHORT = 80  # prompt tokens: the cases that a quick run compares


def generate(client: httpx.Client, cases: Sequence[Case]) -> list[dict]:
    """All cases as one batch request, greedy, EOS ignored."""
    body = {
        "input_ids": [c.prompt_ids for c in cases],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(cases[0].output_ids),
            "ignore_eos": True,
        },
    }
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def score(client: httpx.Client, case: Case) -> list[float | None]:
    body = {
        "input_ids": case.all_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return [entry[0] for entry in reply.json()["meta_info"]["input_token_logprobs"]]


def metric(client: httpx.Client, name: str) -> float:
    """Sum of a metric over its labels; 0 when it was never set."""
    lines = client.get("/metrics").text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"jserve:{name}")]
    return sum(values)


def check_all(client: httpx.Client, cases: Sequence[Case], *, together: bool) -> list[dict]:
    replies = generate(client, cases) if together else [generate(client, [c])[0] for c in cases]
    compared = [check_free_running(c, r["output_ids"]) for c, r in zip(cases, replies, strict=True)]
    assert sum(compared) >= 10 * len(cases), f"near ties ended the comparison early: {compared}"
    return replies


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """Chunks of 64 tokens, 32 rows, pages of 16: every short prompt but the shortest takes two
    chunks or shares one."""
    with serving(*MODEL, "--chunked-prefill-size", "64", "--max-running-requests", "32") as client:
        yield client


@pytest.mark.timeout(600)
def test_cases_alone_equal_the_reference(server: httpx.Client) -> None:
    """Some; the next test has all of the short ones, a full run all alone too."""
    check_all(server, load_cases(SHORT)[::3], together=False)


@pytest.mark.timeout(600)
def test_a_batch_of_sixteen_rows_equals_the_reference(server: httpx.Client) -> None:
    cases = (load_cases(SHORT) * 2)[:18]
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        with httpx.Client(base_url=server.base_url) as client:
            while not done.is_set():
                loads = client.get("/v1/loads").json()["loads"]
                peak = max(peak, loads[0]["num_running_reqs"])
                time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        check_all(server, cases, together=True)
    finally:
        done.set()
        watcher.join()
    assert peak >= 16, f"{peak=} rows ran together"


@pytest.mark.timeout(600)
def test_a_warm_cache_and_chunked_prompts_equal_the_reference(server: httpx.Client) -> None:
    cases = [c for c in load_cases(SHORT) if len(c.prompt_ids) > 64]
    assert cases
    for case in cases:
        server.post("/flush_cache").raise_for_status()
        chunks = metric(server, "num_prefill_chunks_total")
        check_all(server, [case], together=False)
        assert metric(server, "num_prefill_chunks_total") - chunks >= 2
        (warm,) = check_all(server, [case], together=False)
        assert warm["meta_info"]["cached_tokens"] >= 48


@pytest.mark.timeout(600)
def test_prompt_logprobs_equal_the_reference_at_every_position(server: httpx.Client) -> None:
    for case in load_cases(SHORT):
        check_logprobs(case, score(server, case), tolerance=1e-3)


FULL_VARIANTS = {
    "page 1": ("--page-size", "1"),
    "page 16": ("--page-size", "16"),
    "page 64": ("--page-size", "64", "--chunked-prefill-size", "64"),
    "overlap off": ("--disable-overlap-schedule",),
    "no radix cache": ("--disable-radix-cache",),
    "tensor parallel 2, heads padded": ("--tp-size", "2"),
    "tensor parallel 3": ("--tp-size", "3"),
}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", FULL_VARIANTS.values(), ids=FULL_VARIANTS.keys())
def test_the_whole_golden_set_under_every_variant(flags: tuple[str, ...]) -> None:
    cases = load_cases()
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"} if "--tp-size" in flags else {}
    with serving(*MODEL, "--max-running-requests", "32", *flags, timeout=900, env=env) as client:
        check_all(client, cases, together=False)
        replies = check_all(client, cases, together=True)
        warm = sum(r["meta_info"]["cached_tokens"] for r in replies)
        assert (warm == 0) == ("--disable-radix-cache" in flags), f"{warm=}"
        for case in cases:
            check_logprobs(case, score(client, case), tolerance=1e-3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_golden_set_after_retraction_and_eviction() -> None:
    """A pool for 1,600 tokens under 18 cases that want up to 1,494 each and 3,000 together.

    EOS ends an answer here: room for all of it is reserved for requests that ignore EOS, which are
    therefore hardly ever retracted.
    """
    cases = load_cases()
    flags = ("--max-total-tokens", "1600", "--schedule-conservativeness", "0.01")
    with serving(*MODEL, *flags, "--max-running-requests", "32", timeout=900) as client:
        replies = []
        for _ in range(2):
            body = {
                "input_ids": [c.prompt_ids for c in cases],
                "sampling_params": {"temperature": 0, "max_new_tokens": len(cases[0].output_ids)},
            }
            answers = client.post("/generate", json=body).raise_for_status().json()
            for case, answer in zip(cases, answers, strict=True):
                ids = answer["output_ids"]
                check_free_running(case, ids + case.output_ids[len(ids) :])
            replies += answers
        assert sum(r["meta_info"]["num_retractions"] for r in replies) >= 1
        assert metric(client, "evicted_tokens_total") > 0
