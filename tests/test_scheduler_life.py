"""What may happen to a request: scores, abort, retraction, refusal, a failed launch, its turn."""

from __future__ import annotations

import pytest
from scripted_runner import (
    VOCAB,
    Simulation,
    busy_submits,
    crowded,
    logprob,
    prompt,
    solo,
    submit,
    top_logprobs,
)

from jserve.errors import QueueFullError, RequestError
from jserve.types import Abort, LogprobParams

# ---- log-probabilities ----


@pytest.mark.parametrize("start", [0, 1, 4, 8, 11, 24, 25])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_from_any_start_over_chunks_and_a_warm_cache(start, warm):
    sim = Simulation(chunked_prefill_size=8)
    if warm:
        sim.scheduler.submit(submit("w", prompt(25), 2))
        sim.run()
    wanted = LogprobParams(start_len=start, top_num=2, token_ids=(3, 9))
    sim.scheduler.submit(submit("a", prompt(25), 3, logprobs=wanted, stream=True, ignore_eos=True))
    sim.scheduler.submit(submit("b", prompt(9, 4), 3, logprobs=LogprobParams(start_len=2)))
    sim.run()
    ids, first = prompt(25), sim.deltas["a"][0]
    got = first.input_logprobs
    assert got is not None and got.token_ids == ids[start:]
    known = range(max(start, 1), 25)
    head = [None] if start == 0 else []
    assert got.values == head + [logprob(ids[:i], ids[i]) for i in known]
    assert got.top == head + [top_logprobs(ids[:i])[:2] for i in known]
    assert got.ids == head + [[logprob(ids[:i], 3), logprob(ids[:i], 9)] for i in known]
    assert all(d.input_logprobs is None for d in sim.deltas["a"][1:])
    if warm:
        assert first.cached_tokens == max(start - 1, 0) // 4 * 4
    outputs = sim.outputs("a")
    values = [v for d in sim.deltas["a"] if d.logprobs is not None for v in d.logprobs.values]
    assert values == [logprob(ids + outputs[:i], t) for i, t in enumerate(outputs)]
    tops = [t for d in sim.deltas["a"] if d.logprobs is not None for t in d.logprobs.top]
    assert tops == [top_logprobs(ids + outputs[:i])[:2] for i in range(len(outputs))]


def test_prompt_logprobs_are_whole_after_a_retraction():
    sim = crowded(num_pages=17)
    wanted = LogprobParams(start_len=0)
    submits = [
        submit(f"r{i}", prompt(14, i), 20, sampling_seed=i, logprobs=wanted) for i in range(8)
    ]
    for item in submits:
        sim.scheduler.submit(item)
    sim.run()
    assert sim.scheduler.stats()["num_retracted_requests_total"] >= 1
    for item in submits:
        got = sim.deltas[item.rid][0].input_logprobs
        assert got is not None and len(got.values) == 14
        assert got.values[5] == logprob(item.prompt_ids[:5], item.prompt_ids[5])


def test_scoring_without_generating_gives_every_prompt_value():
    sim = Simulation(chunked_prefill_size=8)
    sim.scheduler.submit(submit("a", prompt(21), 0, logprobs=LogprobParams(start_len=0)))
    sim.scheduler.submit(submit("b", prompt(1), 0, logprobs=LogprobParams(start_len=0)))
    sim.run()
    a, b = sim.deltas["a"][-1].input_logprobs, sim.deltas["b"][-1].input_logprobs
    assert a is not None and len(a.values) == 21 and a.values[0] is None
    assert b is not None and b.values == [None]
    assert all(p.score is None or not p.score.want_top for p in sim.plans)


# ---- abort ----


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("depth", [0, 1])
def test_abort_at_every_stage_gives_everything_back_at_once(ticks, stopped, depth):
    """0: waiting; 1 to 4: in chunks; 5: its last chunk in flight; then decoding, one in flight."""
    sim = Simulation(depth=depth, num_slots=2)
    sim.scheduler.submit(submit("keep", prompt(6, 3), 20, ignore_eos=True))
    sim.scheduler.submit(submit("gone", prompt(44), 30, ignore_eos=True, stream=True))
    for _ in range(ticks):
        sim.tick()
    stages = {0: 2, 1: 0}
    assert sim.scheduler.stats()["num_queue_reqs"] == stages.get(ticks, 0)
    sim.scheduler.abort(Abort(rid="gone", stopped=stopped))
    sim.scheduler.check_integrity()
    assert sim.scheduler.stats()["num_running_reqs"] == (ticks > 0)
    sim.scheduler.submit(submit("next", prompt(8, 7), 12, ignore_eos=True))
    sim.run()
    keep, after = submit("k", prompt(6, 3), 20, ignore_eos=True), sim.outputs("next")
    assert sim.outputs("keep") == solo(keep, 5)
    assert after == solo(submit("n", prompt(8, 7), 12, ignore_eos=True), 5)
    assert sim.free_and_cached() and sim.scheduler.idle
    expected = solo(submit("g", prompt(44), 30, ignore_eos=True), 5)
    got = sim.outputs("gone") if "gone" in sim.deltas else []
    assert got == expected[: len(got)]
    if stopped:
        assert all(d.finish is None for d in sim.deltas.get("gone", []))
    else:
        assert sim.finish("gone") == "abort"
        assert sim.scheduler.stats()["num_aborted_requests_total"] == 1


def test_abort_by_prefix_and_abort_of_all():
    sim = Simulation()
    for rid in ("a_0", "a_1", "b_0"):
        sim.scheduler.submit(submit(rid, prompt(4, ord(rid[2])), 30))
    sim.tick()
    sim.scheduler.abort(Abort(rid="a_", exact=True))
    sim.scheduler.abort(Abort(rid="", exact=False))
    assert sim.scheduler.stats()["num_running_reqs"] == 3
    sim.scheduler.abort(Abort(rid="a_", exact=False))
    assert sim.scheduler.stats()["num_running_reqs"] == 1
    sim.scheduler.abort(Abort(abort_all=True))
    assert not sim.scheduler.has_work and not sim.scheduler.idle
    assert sorted(d.rid for d in sim.scheduler.drain()) == ["a_0", "a_1", "b_0"]
    sim.run()
    assert sim.scheduler.idle and sim.free_and_cached()


def test_an_aborted_retracted_request_leaves_the_queue():
    sim = crowded()
    for item in busy_submits():
        sim.scheduler.submit(item)
    while not sim.scheduler.stats()["num_retracted_requests_total"]:
        sim.tick()
    sim.scheduler.abort(Abort(abort_all=True))
    sim.run()
    assert sim.free_and_cached() and sim.scheduler.idle


# ---- seeds ----


def test_seeds_are_drawn_once_and_survive_retraction():
    sim = crowded()
    for i in range(8):
        sim.scheduler.submit(submit(f"r{i}", prompt(8, i), 20, sampling_seed=None))
    sim.run()
    retracted = [rid for rid, d in sim.deltas.items() if d[-1].num_retractions]
    assert retracted
    seeds = sim.runner.seeds_seen
    assert all(len(seen) == 1 for seen in seeds.values())
    assert len(set.union(*seeds.values())) == 8
    for rid in retracted:
        (seed,) = seeds[rid]
        item = submit(rid, prompt(8, int(rid[1:])), 20)
        assert sim.outputs(rid) == solo(item, seed)


# ---- memory pressure ----


def test_retraction_takes_the_shortest_output_and_among_equals_the_longest_prompt():
    sim = Simulation(
        num_pages=23,
        num_slots=4,
        chunked_prefill_size=32,
        schedule_conservativeness=0.0,
        eos_token_ids=(),
    )
    sim.scheduler.submit(submit("old", prompt(8), 40))
    for _ in range(8):
        sim.tick()
    sim.scheduler.submit(submit("short", prompt(5, 1), 20))
    sim.scheduler.submit(submit("long", prompt(13, 2), 20))
    for _ in range(6):
        sim.tick()
    sim.scheduler.submit(submit("late", prompt(4, 3), 12))
    order: list[str] = []

    def watch(_: int) -> None:
        retracted = [r for r in sim.scheduler._roster.waiting if r.num_retractions]
        order.extend(r.rid for r in retracted if r.rid not in order)

    sim.run(each=watch)
    assert order[:2] == ["late", "long"]
    assert sim.deltas["old"][-1].num_retractions == 0


def test_retraction_raises_the_ratio_which_decays_by_step_and_starts_anew_when_idle():
    sim = crowded()
    initial = sim.scheduler.stats()["new_token_ratio"]
    for item in busy_submits():
        sim.scheduler.submit(item)
    ratios = [initial]
    while not sim.scheduler.stats()["num_retracted_requests_total"]:
        ratios.append(sim.scheduler.stats()["new_token_ratio"])
        sim.tick()
    assert min(ratios) < initial
    assert sim.scheduler.stats()["new_token_ratio"] > 10 * initial
    sim.run()
    sim.tick()
    assert sim.scheduler.stats()["new_token_ratio"] == initial


@pytest.mark.parametrize("conservativeness", [0.3, 1.0, 2.0])
def test_the_ratio_falls_to_14_percent_in_600_decode_steps_and_no_further(conservativeness):
    sim = Simulation(
        num_pages=400,
        context_length=1200,
        schedule_conservativeness=conservativeness,
        eos_token_ids=(),
    )
    first = min(0.7 * conservativeness, 1.0)
    sim.scheduler.submit(submit("a", prompt(5), 800))
    sim.tick()  # its prompt
    for n in range(1, 700):
        sim.tick()
        expected = max(first - n * (first - 0.14 * first) / 600, 0.14 * first)
        assert sim.scheduler.stats()["new_token_ratio"] == pytest.approx(expected)
    sim.run()
    sim.tick()
    assert sim.scheduler.stats()["new_token_ratio"] == pytest.approx(first)


def test_after_a_retraction_the_ratio_is_what_the_others_used_and_twenty_steps_more():
    sim = crowded(eos_token_ids=(), depth=0, num_pages=20, chunked_prefill_size=32)
    for i in range(4):
        sim.scheduler.submit(submit(f"r{i}", prompt(8, i), 24))
        sim.tick()
    used: dict[str, int] = {}
    while not sim.scheduler.stats()["num_retracted_requests_total"]:
        assert sim.scheduler.has_work
        residents = sim.scheduler._roster.residents
        used = {row.request.rid: len(row.request.output_ids) for row in residents}
        sim.tick()
    (gone,) = [r.rid for r in sim.scheduler._roster.waiting if r.num_retractions]
    del used[gone]
    assert len(used) >= 2
    expected = (sum(used.values()) + 20 * len(used)) / (24 * len(used) + 1)
    assert sim.scheduler.stats()["new_token_ratio"] == min(1.0, expected)


def test_the_last_request_is_not_retracted_but_fails_when_the_pool_is_too_small():
    sim = Simulation(num_pages=6)
    sim.scheduler.submit(submit("a", prompt(10), 60, ignore_eos=True, stream=True))
    sim.run()
    finish = sim.deltas["a"][-1].finish
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 500)
    assert sim.outputs("a") == solo(submit("a", prompt(10), 60, ignore_eos=True), 5)[:11]
    assert sim.scheduler.stats()["num_retracted_requests_total"] == 0 and sim.free_and_cached()
    assert sim.scheduler.stats()["allocator_failures_total"] >= 1


def test_a_candidate_needs_strictly_less_than_what_is_free():
    """10 tokens to compute, 8 or 10 to come, a page of 4: 22 or 24, of 24 that are free."""
    for new, admitted in ((8, True), (10, False)):
        sim = Simulation(num_pages=9, eos_token_ids=(), schedule_conservativeness=0.0)
        sim.scheduler.submit(submit("a", prompt(5), 3))
        sim.tick()
        assert sim.cache.available_pages == 6
        sim.scheduler.submit(submit("b", prompt(10, 1), new))
        sim.tick()
        assert (sim.scheduler.stats()["num_queue_reqs"] == 0) == admitted
        sim.run()


def test_running_requests_are_reserved_for_by_the_ratio():
    """Of 80 tokens 8 are in use and 39 to come, reserved in whole (ignore_eos) or by 0.7."""
    for ignore_eos, admitted in ((False, True), (True, False)):
        sim = Simulation(num_pages=21, eos_token_ids=())
        sim.scheduler.submit(submit("a", prompt(5), 40, ignore_eos=ignore_eos))
        sim.tick()
        sim.scheduler.submit(submit("b", prompt(8, 1), 25, ignore_eos=True))
        sim.tick()
        assert (sim.scheduler.stats()["num_queue_reqs"] == 0) == admitted


def test_alone_a_request_starts_even_if_its_whole_output_does_not_fit():
    sim = Simulation(num_pages=8, eos_token_ids=())
    sim.scheduler.submit(submit("a", prompt(27), 40))
    sim.tick()
    assert sim.scheduler.stats()["num_running_reqs"] == 1
    sim.run()


# ---- refusals ----


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        (submit("a", prompt(96), 1), "input_ids", ["96"]),
        (submit("a", prompt(100), 1), "input_ids", ["100", "96"]),
        (submit("a", prompt(90), 7), "max_new_tokens", ["90", "7", "96"]),
        (submit("a", prompt(85), 1), "input_ids", ["85", "84"]),
        (submit("a", [], 1), "input_ids", ["at least one"]),
        (submit("a", [1, VOCAB], 1), "input_ids", [str(VOCAB)]),
        (submit("a", [-1], 1), "input_ids", [str(VOCAB)]),
        (submit("a", [1 << 64], 1), "input_ids", [str(VOCAB)]),
        (
            submit("a", prompt(5), 1, logprobs=LogprobParams(start_len=6)),
            "logprob_start_len",
            ["5", "6"],
        ),
        (submit("taken", prompt(5), 1), "rid", ["taken"]),
    ],
)
def test_a_request_that_can_never_run_is_refused_naming_field_and_numbers(item, param, words):
    sim = Simulation(num_pages=22)
    sim.scheduler.submit(submit("taken", prompt(4), 1))
    with pytest.raises(RequestError) as caught:
        sim.scheduler.submit(item)
    assert caught.value.param == param
    assert all(word in caught.value.message for word in words)
    sim.run()


def test_a_full_queue_refuses():
    sim = Simulation(max_queued=2)
    for rid in "ab":
        sim.scheduler.submit(submit(rid, prompt(5), 1))
    with pytest.raises(QueueFullError, match="queue is full"):
        sim.scheduler.submit(submit("c", prompt(5), 1))
    sim.tick()
    sim.scheduler.submit(submit("c", prompt(5), 1))
    sim.run()
    assert len(sim.deltas) == 3


# ---- failure of the device ----


def test_after_a_failed_launch_running_requests_start_again_with_their_outputs_once():
    sim = Simulation()
    items = [submit(f"r{i}", prompt(20, i), 12, ignore_eos=True, sampling_seed=i) for i in range(5)]
    for item in items:
        sim.scheduler.submit(item)
    for _ in range(6):
        sim.tick()
    sim.queue.clear()  # nobody will ever read these
    assert sim.scheduler.reset_device() == []
    sim.scheduler.check_integrity()
    assert sim.scheduler.stats()["num_running_reqs"] == 0 and sim.cache.tree.evictable_pages == 0
    sim.run()
    for i, item in enumerate(items):
        assert sim.outputs(item.rid) == solo(item, i)


def test_a_request_that_meets_two_failed_launches_fails():
    sim = Simulation()
    sim.scheduler.submit(submit("a", prompt(20), 12, ignore_eos=True))
    for _ in range(2):
        sim.tick()
        sim.queue.clear()
        deltas = sim.scheduler.reset_device()
    assert [(d.rid, d.finish.type, d.finish.status_code) for d in deltas if d.finish] == [
        ("a", "abort", 500)
    ]
    assert sim.scheduler.idle


# ---- policies ----


def admitted(sim: Simulation) -> list[str]:
    sim.run()
    return [plan.rows[-1].request.rid for plan in sim.plans if plan.edits]


def test_fcfs_admits_in_order_of_arrival_and_lof_the_longest_output_first():
    for policy, order in (("fcfs", ["a", "b", "c"]), ("lof", ["b", "c", "a"])):
        sim = Simulation(policy=policy, num_slots=1)
        for rid, new in (("a", 2), ("b", 9), ("c", 5)):
            sim.scheduler.submit(submit(rid, prompt(5, ord(rid)), new))
        assert admitted(sim) == order


def test_lpm_admits_the_longest_cached_prefix_first():
    sim = Simulation(policy="lpm", num_slots=1)
    sim.scheduler.submit(submit("w", prompt(40), 2))
    sim.run()
    for rid, shared in (("a", 0), ("b", 33), ("c", 37)):
        sim.scheduler.submit(submit(rid, prompt(40)[:shared] + prompt(6, 50), 2))
    assert admitted(sim)[1:] == ["c", "b", "a"]


def test_lpm_is_fcfs_while_more_than_128_requests_wait():
    for others, first in ((126, "b"), (127, "a")):
        sim = Simulation(policy="lpm", num_slots=1)
        sim.scheduler.submit(submit("w", prompt(40), 0))
        sim.run()
        sim.scheduler.submit(submit("a", prompt(6, 50), 1))
        sim.scheduler.submit(submit("b", prompt(40), 1))
        for i in range(others):
            sim.scheduler.submit(submit(f"r{i}", [i % 64, i // 64, 3, 3], 1))
        sim.tick()
        assert sim.plans[-1].rows[-1].request.rid == first, others


def test_lpm_lets_one_of_two_siblings_compute_their_prefix_for_both():
    sim = Simulation(policy="lpm", num_slots=4, chunked_prefill_size=96, max_prefill_tokens=96)
    for rid in ("a", "b"):
        sim.scheduler.submit(submit(rid, [*prompt(40), ord(rid) % VOCAB], 2))
    sim.scheduler.submit(submit("c", prompt(36, 9), 2))
    sim.run()
    assert [len(plan.edits) for plan in sim.plans if plan.edits] == [2, 1]
    assert sim.deltas["b"][-1].cached_tokens == 40


def test_dfs_weight_goes_into_the_subtree_with_the_most_waiting_first():
    sim = Simulation(policy="dfs-weight", num_slots=1)
    for rid, salt in (("w", 0), ("v", 1)):
        sim.scheduler.submit(submit(rid, prompt(20, salt), 2))
        sim.run()
    sim.scheduler.submit(submit("new", prompt(20, 2), 2))
    for rid, salt in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        sim.scheduler.submit(submit(rid, prompt(20, salt) + prompt(3, ord(rid)), 2))
    # b, c and a as the weights are 3 and 1, 2 and 1, 1 and 1; "new" ends at the root
    assert admitted(sim)[2:] == ["b", "c", "a", "d", "new"]


def test_random_admits_everybody_in_some_other_order():
    sim = Simulation(policy="random", num_slots=1)
    rids = [f"r{i}" for i in range(8)]
    for rid in rids:
        sim.scheduler.submit(submit(rid, prompt(5, int(rid[1])), 2))
    order = admitted(sim)
    assert sorted(order) == rids and order != rids
