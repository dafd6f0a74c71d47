"""How long decoding rows wait while prompts are computed: bounded in the plan, and in milliseconds
on this machine (which must be otherwise idle for that)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_runner import Simulation, prompt, solo, submit

from jserve.plan import StepPlan
from jserve.scheduler.admission import prompt_budget
from jserve.scheduler.settings import SchedulerSettings

TOLERANCE = 1.15  # of a bound on a machine that others may disturb


def prompt_tokens(plan: StepPlan) -> int:
    return plan.num_tokens - plan.num_decode_rows


def long_prompts_beside_streams(num_streams: int, num_prompts: int = 1, **settings) -> Simulation:
    """Streams that decode, then `num_prompts` of 60 tokens at once, to the end of all."""
    numbers = {"num_slots": num_streams + 2, "chunked_prefill_size": 32, "num_pages": 200}
    sim = Simulation(**(numbers | settings))
    submits = [
        submit(f"s{i}", prompt(4, i), 40, ignore_eos=True, stream=True) for i in range(num_streams)
    ]
    late = [submit(f"long{i}", prompt(60, 50 + i), 4, ignore_eos=True) for i in range(num_prompts)]

    def arrive(tick: int) -> None:
        if tick == 4:
            for item in late:
                sim.scheduler.submit(item)

    for item in submits:
        sim.scheduler.submit(item)
    sim.run(each=arrive)
    for item in (*submits, *late):
        assert sim.outputs(item.rid) == solo(item, 5), item.rid
    return sim


@pytest.mark.parametrize(("mixed_chunk_size", "most"), [(8, 4), (12, 8), (16, 12), (1000, 28)])
def test_a_step_with_decode_rows_holds_no_more_prompt_than_its_budget(mixed_chunk_size, most):
    sim = long_prompts_beside_streams(3, 2, mixed_chunk_size=mixed_chunk_size)
    mixed = [plan for plan in sim.plans if plan.num_decode_rows and prompt_tokens(plan)]
    assert max(map(prompt_tokens, mixed)) == most
    assert all(plan.num_tokens <= max(mixed_chunk_size, 3 + 4) for plan in mixed)
    assert sim.runner.chunks["long0"] >= 2
    assert len(mixed) >= 120 // most


def test_decode_rows_advance_in_every_step_of_a_long_prompt_and_it_ends():
    sim = long_prompts_beside_streams(3, mixed_chunk_size=8)
    mixed = [plan for plan in sim.plans if plan.num_decode_rows and prompt_tokens(plan)]
    assert all(plan.num_decode_rows == 3 for plan in mixed) and sim.runner.chunks["long0"] == 15
    assert len(sim.outputs("long0")) == 4


def test_with_more_decode_rows_than_the_budget_a_prompt_still_gets_a_page_a_step():
    sim = long_prompts_beside_streams(12, mixed_chunk_size=8)
    mixed = [plan for plan in sim.plans if plan.num_decode_rows == 12 and prompt_tokens(plan)]
    assert {prompt_tokens(plan) for plan in mixed} == {4}
    assert sim.runner.chunks["long0"] == 15


def test_prompts_get_more_of_a_step_while_many_wait_and_the_last_one_does_not():
    sim = long_prompts_beside_streams(4, 12, mixed_chunk_size=8, mixed_chunk_most=32, num_slots=6)
    mixed = [plan for plan in sim.plans if plan.num_decode_rows and prompt_tokens(plan)]
    assert prompt_tokens(mixed[0]) == 28  # 11 wait behind it for 4 that decode: the whole chunk
    last = [plan for plan in mixed if any(r.request.rid == "long11" for r in plan.rows)]
    assert prompt_tokens(last[-1]) <= 4


def test_without_decode_rows_a_prompt_has_the_whole_chunk():
    sim = Simulation(chunked_prefill_size=32, mixed_chunk_size=8)
    sim.scheduler.submit(submit("a", prompt(70), 2))
    sim.run()
    assert [prompt_tokens(plan) for plan in sim.plans[:3]] == [32, 32, 6]


def test_without_mixing_a_prompt_stops_every_decode_row_until_it_is_computed():
    sim = long_prompts_beside_streams(3, mixed=False, mixed_chunk_size=8)
    chunks = [plan for plan in sim.plans if any(r.request.rid == "long0" for r in plan.rows)]
    alone = [plan for plan in chunks if prompt_tokens(plan)]
    assert [prompt_tokens(plan) for plan in alone] == [32, 28]
    assert not any(plan.num_decode_rows for plan in alone)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_budget_is_never_below_a_page_nor_above_the_chunk(page_size):
    settings = SchedulerSettings(
        num_slots=64,
        context_length=512,
        page_size=page_size,
        chunked_prefill_size=96,
        max_prefill_tokens=96,
        vocab_size=64,
        mixed_chunk_size=64,
    )
    assert prompt_budget(settings, 0) == 96
    assert prompt_budget(settings, 1) == 63 and prompt_budget(settings, 48) == 16
    assert prompt_budget(settings, 64) == page_size
    for rows in range(1, 96 - page_size + 1):
        assert page_size <= prompt_budget(settings, rows) <= min(64, 96 - rows)


def test_a_given_budget_stays_and_an_automatic_one_grows_with_those_who_wait():
    numbers = {"num_slots": 64, "context_length": 512, "page_size": 4, "vocab_size": 64}
    chunks = {"chunked_prefill_size": 96, "max_prefill_tokens": 96, "mixed_chunk_size": 32}
    given = SchedulerSettings(**numbers, **chunks)
    automatic = SchedulerSettings(**numbers, **chunks, mixed_chunk_most=96)
    assert {prompt_budget(given, 8, behind) for behind in range(100)} == {24}
    grown = [prompt_budget(automatic, 8, behind) for behind in range(100)]
    assert grown[:2] == [24] * 2 and grown == sorted(grown)
    assert grown[2:8] == [56] * 6, "twice as large, and no more while far fewer wait"
    assert grown[8] == 56 and grown[30] == 88, "sizes of buckets, with 8 rows"
    assert prompt_budget(given, 3) == 29 and prompt_budget(automatic, 3) == 13, "few rows"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_p99_stays_within_three_medians_while_long_prompts_arrive_every_second() -> None:
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    command = [sys.executable, str(root / "scripts" / "itl_check")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    mixed, unmixed = result["mixed"], result["unmixed"]
    assert mixed["prompts"] >= 20 and unmixed["prompts"] >= 20
    assert mixed["p99_per_median"] <= 3 * TOLERANCE, result
    assert unmixed["itl_ms"]["p99"] > 1.3 * mixed["itl_ms"]["p99"], result
