"""What the scheduler plans and reports, in the real order: plan(N + 1), read(N), commit(N)."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_runner import (
    EOS,
    Simulation,
    busy_submits,
    crowded,
    prompt,
    solo,
    submit,
)

from jserve.plan import Kind
from jserve.types import LogprobParams

# ---- overlap ----


def test_plan_of_the_next_step_precedes_the_read_of_this_one_in_every_steady_tick():
    sim = Simulation()
    for i in range(3):
        sim.scheduler.submit(submit(f"r{i}", prompt(9, i), 20, ignore_eos=True))
    sim.run()
    at = {event: i for i, event in enumerate(sim.runner.log)}
    steps = len(sim.plans)
    assert steps > 20
    late = [n for n in range(steps - 1) if at["plan", n + 1] > at["read", n]]
    assert late == [], "only the last step has no successor"


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_equal_solo_runs_through_chunks_retraction_and_eviction(depth, mixed, radix):
    sim = crowded(depth=depth, mixed=mixed, radix=radix)
    submits = busy_submits()
    for item in submits:
        sim.scheduler.submit(item)
    sim.run()
    for i, item in enumerate(submits):
        assert sim.outputs(item.rid) == solo(item, i), item.rid
    stats = sim.scheduler.stats()
    assert stats["num_retracted_requests_total"] >= 1
    assert stats["evicted_tokens_total"] > 0 or not radix
    assert max(sim.runner.chunks.values()) >= 2
    assert max(d[-1].num_retractions for d in sim.deltas.values()) >= 1
    assert sim.free_and_cached() and sim.scheduler.idle


def test_a_request_is_not_planned_beyond_what_ends_it_for_certain():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(5), 3, ignore_eos=True))
    sim.run()
    assert len(sim.plans) == 3 and sim.plans[-1].kv_lens.tolist() == [7]


def test_a_stop_learnt_one_step_late_costs_one_discarded_token():
    item = next(
        item
        for seed in range(200)
        if 2 < len(solo(item := submit("a", prompt(5), 30, sampling_seed=seed), seed)) < 20
    )
    expected = solo(item, item.sampling.sampling_seed)
    sim = Simulation()
    sim.scheduler.submit(item)
    sim.run()
    assert sim.outputs("a") == expected and expected[-1] == EOS
    assert len(sim.plans) == len(expected) + 1
    finish = sim.deltas["a"][-1].finish
    assert finish is not None and (finish.type, finish.matched) == ("stop", EOS)


# ---- plans ----


def test_decode_rows_come_first_and_share_one_token_budget_with_one_cut_prompt():
    sim = Simulation(num_slots=8, chunked_prefill_size=16, num_pages=99)
    for i in range(3):
        sim.scheduler.submit(submit(f"d{i}", prompt(4, i), 30, ignore_eos=True))
    sim.tick()
    sim.tick()
    sim.scheduler.submit(submit("long", prompt(50, 9), 2))
    sim.scheduler.submit(submit("after", prompt(30, 8), 2))
    for _ in range(7):
        sim.tick()
    mixed = [p for p in sim.plans if p.kind is Kind.MIXED and p.num_decode_rows]
    assert len(mixed) >= 5
    for plan in mixed:
        assert plan.num_decode_rows >= 3 and plan.num_tokens <= 16
        cut = [row for row, s in zip(plan.rows, plan.samples, strict=True) if not s]
        assert len(cut) <= 1
    # 16 − 3 decode rows, down to whole pages of 4
    assert mixed[0].q_lens.tolist() == [1, 1, 1, 12]


def test_with_mixing_off_prompts_have_steps_of_their_own_and_go_first():
    sim = Simulation(mixed=False)
    sim.scheduler.submit(submit("a", prompt(4), 20, ignore_eos=True))
    sim.tick()
    sim.tick()
    sim.scheduler.submit(submit("b", prompt(30, 1), 4))
    sim.tick()
    sim.tick()
    assert [p.num_decode_rows for p in sim.plans] == [0, 1, 0, 0]
    assert [p.num_tokens for p in sim.plans] == [4, 1, 16, 14]
    sim.run()
    assert all(p.num_decode_rows in (0, len(p.rows)) for p in sim.plans)


def test_a_prompt_tail_of_one_token_rides_in_a_decode_step():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(4), 20, ignore_eos=True))
    sim.tick()
    sim.scheduler.submit(submit("b", prompt(1, 5), 4))
    sim.tick()
    plan = sim.plans[-1]
    assert plan.kind is Kind.DECODE and plan.num_decode_rows == 1
    assert plan.token_ids.tolist() == [-1, prompt(1, 5)[0]]


def test_prompts_still_get_in_when_decode_rows_alone_fill_the_token_budget():
    sim = Simulation(num_slots=8, chunked_prefill_size=8, num_pages=99)
    for i in range(8):
        sim.scheduler.submit(submit(f"r{i}", prompt(4, i), 40, ignore_eos=True, sampling_seed=i))
    sim.run()
    assert max(p.num_decode_rows for p in sim.plans) == 8


def test_no_step_takes_more_prompt_than_max_prefill_tokens_once_it_has_one():
    sim = Simulation(chunked_prefill_size=96, max_prefill_tokens=20, num_pages=99)
    for i in range(4):
        sim.scheduler.submit(submit(f"r{i}", prompt(12, i), 2))
    sim.tick()
    assert sim.plans[0].q_lens.tolist() == [12]
    sim.run()


def test_sampler_and_logprob_flags_follow_the_rows_that_sample():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(20), 3, temperature=0.0, ignore_eos=True))
    sim.tick()
    sim.scheduler.submit(submit("b", prompt(4, 1), 2, logprobs=LogprobParams()))
    sim.run()
    flags = [(p.full_sampler, p.logprobs) for p in sim.plans]
    assert flags[0] == (False, False) and (True, True) in flags and flags[-1] == (False, False)


def test_slot_edits_carry_the_sampling_parameters_as_the_device_wants_them():
    sim = Simulation()
    sim.scheduler.submit(
        submit(
            "a",
            prompt(6),
            4,
            temperature=0.0,
            top_k=-1,
            min_new_tokens=2,
            stop_token_ids=(3, EOS),
            logit_bias={5: 1.5},
            logprobs=LogprobParams(token_ids=(9, 8)),
            sampling_seed=-3,
        )
    )
    sim.tick()
    sampling = sim.plans[0].edits[0].sampling
    assert sampling.seed == -3 and sampling.temperature == 0.0 and sampling.top_k == 1 << 30
    assert sampling.stop_ids == (EOS, 3) and sampling.min_new_tokens == 2
    assert sampling.bias_ids == (5,) and sampling.bias_values == (1.5,)
    assert sampling.logprob_ids == (9, 8)


# ---- sharing ----


def test_a_running_requests_prompt_pages_are_shared_one_step_later():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(13), 30, ignore_eos=True))
    sim.tick()
    sim.scheduler.submit(submit("b", prompt(13), 30, ignore_eos=True, sampling_seed=6))
    sim.tick()
    edit = sim.plans[1].edits[0]
    assert edit.pages.tolist() == sim.runner.tables[0][:3]
    sim.run()
    assert sim.deltas["a"][-1].cached_tokens == 0 and sim.deltas["b"][-1].cached_tokens == 12
    assert sim.scheduler.stats()["cached_tokens_total"] == 12


def test_a_following_turn_reuses_prompt_and_answer_but_for_the_last_token():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(10), 7, ignore_eos=True))
    sim.run()
    turn = prompt(10) + sim.outputs("a") + prompt(5, 3)
    sim.scheduler.submit(submit("b", turn, 4))
    sim.run()
    assert sim.deltas["b"][-1].cached_tokens == 16  # 10 + 7 − 1 tokens had KV


def test_the_last_prompt_token_is_always_computed():
    sim = Simulation()
    for rid in ("a", "b"):
        sim.scheduler.submit(submit(rid, prompt(12), 4))
        sim.run()
    assert sim.deltas["b"][-1].cached_tokens == 8


@pytest.mark.parametrize("key", [{"extra_key": "lora"}, {"cache_salt": "x"}])
def test_namespaces_do_not_share(key):
    sim = Simulation()
    for rid, namespace in (("a", {}), ("b", key), ("c", key)):
        sim.scheduler.submit(submit(rid, prompt(13), 3, **namespace))
        sim.run()
    cached = [sim.deltas[rid][-1].cached_tokens for rid in "abc"]
    assert cached == [0, 0, 12]


def test_flush_empties_the_cache_only_when_idle():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(13), 3))
    sim.tick()
    assert not sim.scheduler.flush_cache()
    sim.run()
    assert sim.scheduler.flush_cache()
    sim.scheduler.submit(submit("b", prompt(13), 3))
    sim.run()
    assert sim.deltas["b"][-1].cached_tokens == 0


# ---- Deltas ----


def test_a_streaming_request_gets_a_delta_a_token_and_another_one_only_the_last():
    sim = Simulation()
    sim.scheduler.submit(submit("s", prompt(5), 6, stream=True, ignore_eos=True))
    sim.scheduler.submit(submit("q", prompt(5, 1), 6, ignore_eos=True))
    sim.scheduler.submit(submit("t", prompt(5, 2), 6, stop=("x",), ignore_eos=True))
    sim.run()
    assert [len(d.token_ids) for d in sim.deltas["s"]] == [1] * 6
    assert [d.completion_tokens for d in sim.deltas["s"]] == [1, 2, 3, 4, 5, 6]
    assert [len(d.token_ids) for d in sim.deltas["q"]] == [6]
    assert len(sim.deltas["t"]) == 6, "stop strings are searched for as tokens come"
    last = sim.deltas["q"][0]
    assert last.prompt_tokens == 5 and last.prefill_finished > 0 and last.queue_time >= 0
    assert last.finish is not None and (last.finish.type, last.finish.length) == ("length", 6)


def test_max_new_tokens_0_computes_the_prompt_and_samples_nothing():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(40), 0))
    sim.run()
    assert sim.outputs("a") == [] and not any(p.samples.any() for p in sim.plans)
    delta = sim.deltas["a"][-1]
    assert delta.finish is not None and (delta.finish.type, delta.finish.length) == ("length", 0)
    sim.scheduler.submit(submit("b", prompt(40), 2))
    sim.run()
    assert sim.deltas["b"][-1].cached_tokens == 36


def test_max_new_tokens_none_runs_up_to_the_context_or_the_pool():
    for num_pages, expected in ((64, 96 - 10), (8, 7 * 4 - 10 + 1)):
        sim = Simulation(num_pages=num_pages)
        sim.scheduler.submit(submit("a", prompt(10), None, ignore_eos=True))
        sim.run()
        assert len(sim.outputs("a")) == expected and sim.finish("a") == "length"


def test_stop_tokens_end_a_request_unless_ignored_or_before_min_new_tokens():
    free = solo(submit("x", prompt(5), 12, ignore_eos=True), 5)
    stop = free[4]
    first = free.index(stop)
    sim = Simulation(eos_token_ids=())
    sim.scheduler.submit(submit("a", prompt(5), 12, stop_token_ids=(stop,)))
    sim.scheduler.submit(submit("b", prompt(5), 12, stop_token_ids=(stop,), ignore_eos=True))
    sim.scheduler.submit(submit("c", prompt(5), 12, stop_token_ids=(stop,), min_new_tokens=5))
    sim.run()
    assert sim.outputs("a") == free[: first + 1] and sim.finish("a") == "stop"
    assert sim.outputs("b") == free and sim.finish("b") == "length"
    assert sim.outputs("c")[:5] == free[:5] and len(sim.outputs("c")) > 5


def test_nan_logits_end_the_request_with_an_eos_and_leave_nothing_in_the_cache():
    sim = Simulation()
    sim.runner.nan_steps = {2}
    sim.scheduler.submit(submit("a", prompt(7), 9, ignore_eos=True, logprobs=LogprobParams()))
    sim.run()
    finish = sim.deltas["a"][-1].finish
    assert finish is not None and (finish.type, finish.matched) == ("stop", "NaN happened")
    assert sim.outputs("a")[-1] == EOS and len(sim.outputs("a")) == 3
    assert sim.cache.tree.evictable_pages == 0 and sim.free_and_cached()


@pytest.mark.parametrize(("step", "limit"), [(0, 0), (1, 0), (2, 0), (0, 3), (2, 3)])
def test_nan_among_a_prompts_scores_ends_the_request_and_leaves_nothing_in_the_cache(step, limit):
    sim = Simulation(chunked_prefill_size=8)
    sim.runner.nan_steps = {step}  # of the three chunks
    sim.scheduler.submit(submit("a", prompt(21), limit, logprobs=LogprobParams(start_len=0)))
    sim.run()
    last = sim.deltas["a"][-1]
    assert last.finish is not None and last.input_logprobs is None
    assert (last.finish.type, last.finish.matched) == ("stop", "NaN happened")
    assert sim.outputs("a") == [] and sim.runner.chunks["a"] >= step + 1
    assert sim.cache.tree.evictable_pages == 0 and sim.free_and_cached()
    sim.scheduler.submit(submit("b", prompt(21), 0, logprobs=LogprobParams(start_len=0)))
    sim.run()
    assert sim.finish("b") == "length" and sim.deltas["b"][-1].cached_tokens == 0


# ---- numbers ----


def test_stats_count_tokens_chunks_and_hits():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(13), 8, ignore_eos=True))
    sim.tick()
    sim.scheduler.submit(submit("b", prompt(13), 8))
    sim.tick()
    stats = sim.scheduler.stats()
    assert stats["cache_hit_rate"] == 12 / 13 and stats["num_running_reqs"] == 2
    assert stats["kv_used_tokens"] + stats["kv_available_tokens"] == 63 * 4
    assert 0 < stats["token_usage"] < 1
    sim.scheduler.submit(submit("c", prompt(40, 3), 2))
    sim.run()
    stats = sim.scheduler.stats()
    tokens = sum(len(sim.outputs(rid)) for rid in "abc")
    assert stats["generation_tokens_total"] == tokens and stats["prompt_tokens_total"] == 66
    assert stats["cached_tokens_total"] == 12 and stats["prefill_tokens_total"] == 54
    assert stats["num_prefill_chunks_total"] >= 5 and stats["num_chunked_requests_total"] == 1
    assert stats["num_requests_total"] == 3


def test_plan_arrays_are_fresh_each_step():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(5), 8, ignore_eos=True))
    sim.run()
    for one, two in zip(sim.plans[1:], sim.plans[2:], strict=False):
        for name in ("kv_lens", "token_ids", "new_pages", "output_index"):
            assert not np.shares_memory(getattr(one, name), getattr(two, name)), name
