"""The runner with a model that computes by hand: every kind of step, sampling, scores, edits,
failure.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest
from fake_model import (
    PAGE,
    VOCAB,
    Driver,
    FakeModel,
    FakeRequest,
    Settings,
    context_logits,
    fake_params,
    head_table,
    prompt_score,
)

from jserve.batch import MOST_COUNTED
from jserve.plan import Kind, SlotSampling
from jserve.runner import programs, startup
from jserve.runner.buckets import Key
from jserve.runner.manifest import Program
from jserve.runner.runner import Runner
from jserve.runner.startup import compile_programs
from jserve.types import MAX_TOP_LOGPROBS, TOP_K_ALL
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

HEAD = head_table()


def make_runner(tensor=1, **settings):
    rules = Rules(make_mesh(jax.devices(), tensor=tensor), TP)
    progress = []
    parts = compile_programs(
        FakeModel(tensor),
        fake_params(rules),
        rules,
        Settings(**settings),
        lambda done, total: progress.append((done, total)),
    )
    runner = Runner(*parts)
    assert progress[-1][1] == runner.compiled[1]
    return runner


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "EDIT_ROWS", 2)  # so that admitting three takes two uploads
        runner = make_runner()
    runner.manifest.wait_all()
    yield runner
    runner.close()


@pytest.fixture
def driver(shared):
    shared.reset()
    return Driver(shared)


def greedy(prompt, count, head=HEAD):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(context_logits(ids, head).argmax()))
    return ids[len(prompt) :]


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_chunks_then_decode_steps_equal_the_formula(driver):
    request = driver.admit(FakeRequest(3, prompt(0, 21)))
    driver.run([(request, 8)])
    assert request.outputs == []
    driver.run([(request, 8)])
    driver.run([(request, 5)])
    for _ in range(30):
        driver.run([(request, 0)])
    assert request.outputs == greedy(request.prompt, 31)
    assert len(request.pages) == -(-(21 + 30) // PAGE)


def test_mixed_steps_carry_decode_rows_chunks_and_rows_that_do_not_sample(driver):
    a = driver.admit(FakeRequest(0, prompt(1, 5)))
    driver.run([(a, 5)])
    b = driver.admit(FakeRequest(3, prompt(2, 9)))
    c = driver.admit(FakeRequest(2, prompt(3, 6)))
    outcome = driver.run([(a, 0), (b, 4), (c, 6)])
    assert len(outcome.token_ids) == 2
    assert driver.run([(a, 0), (c, 0), (b, 4)]).token_ids.shape == (2,)
    last = driver.plan([(a, 0), (c, 0), (b, 1)])
    assert last.kind is Kind.DECODE and last.num_decode_rows == 2, "a one-token tail may ride along"
    flight = driver.runner.launch(last)
    assert flight.hidden.all.shape[0] == 4
    driver.runner.finish(flight)
    driver.record([(a, 0), (c, 0), (b, 1)], last, flight)
    for request in (a, b, c):
        assert request.outputs == greedy(request.prompt, len(request.outputs))
    assert [len(r.outputs) for r in (a, b, c)] == [4, 1, 3]


def test_tokens_are_counted_before_and_after_padding(driver):
    before, requests = driver.runner.tokens.copy(), [FakeRequest(i, prompt(i, 5)) for i in range(3)]
    for request in requests:
        driver.admit(request)
        driver.run([(request, 5)])  # of 8 tokens
    driver.run([(request, 0) for request in requests])  # of 4 rows
    counted = driver.runner.tokens - before
    assert counted == {
        "bucket_real_tokens_total/mixed": 15,
        "bucket_padded_tokens_total/mixed": 24,
        "bucket_real_tokens_total/decode": 3,
        "bucket_padded_tokens_total/decode": 4,
    }


def test_a_step_in_which_nothing_samples_has_no_tokens(driver):
    request = driver.admit(FakeRequest(0, prompt(1, 9)))
    outcome = driver.run([(request, 8)])
    assert outcome.token_ids.shape == (0,) and outcome.logprobs is None and outcome.score is None


def test_launches_overlap_and_the_device_feeds_itself(driver):
    request = driver.admit(FakeRequest(1, prompt(4, 7)))
    driver.run([(request, 7)])
    flights = []
    for _ in range(6):
        plan = driver.plan([(request, 0)])
        flight = driver.runner.launch(plan)
        driver.runner.finish(flight)
        flights.append((plan, flight))
    assert len(request.outputs) == 1, "nothing was read between the launches"
    assert [int(plan.output_index[0]) for plan, _ in flights] == [1, 2, 3, 4, 5, 6]
    for plan, flight in flights:
        driver.record([(request, 0)], plan, flight)
    assert request.outputs == greedy(request.prompt, 7)


def test_a_cached_prefix_is_read_through_the_edited_table(driver):
    first = driver.admit(FakeRequest(0, prompt(5, 10)))
    driver.run([(first, 10)])
    shared_pages = first.pages[:2]
    second = FakeRequest(1, first.prompt[:8] + prompt(6, 3), pages=list(shared_pages), cached=8)
    driver.admit(second)
    driver.run([(second, 3)])
    driver.run([(second, 0)])
    assert second.outputs == greedy(second.prompt, 2)
    third = FakeRequest(0, prompt(7, 2))  # the slot's next owner sees nothing of the first
    driver.admit(third)
    driver.run([(third, 2)])
    assert third.outputs == greedy(third.prompt, 1)


@pytest.mark.parametrize("want_top", [False, True])
def test_prompt_scores_are_log_softmax_in_mixed_and_decode_steps(driver, want_top):
    ids = (0, 5, VOCAB - 1)
    request = FakeRequest(2, prompt(8, 12), SlotSampling(logprob_ids=ids))
    other = driver.admit(FakeRequest(0, prompt(9, 3)))
    driver.run([(other, 3)])
    driver.admit(request)
    work = [(other, 0), (request, 11)]
    mixed = driver.run(work, score=prompt_score(request, 0, 11, want_top, offset=1)).score
    table = np.stack(
        [log_softmax(context_logits(request.prompt[: n + 1], HEAD)) for n in range(11)]
    )
    expected = table[np.arange(11), request.prompt[1:]]
    np.testing.assert_allclose(mixed.values, expected, atol=1e-5)
    if want_top:
        order = np.argsort(-table, axis=1, kind="stable")[:, :MAX_TOP_LOGPROBS]
        assert (mixed.top_ids == order).all()
        np.testing.assert_allclose(mixed.id_values[:, :3], table[:, ids], atol=1e-5)
        best = np.take_along_axis(table, order, axis=1)
        np.testing.assert_allclose(mixed.top_values, best, atol=1e-5)
    else:
        assert mixed.top_values is None and mixed.top_ids is None and mixed.id_values is None
    tail = FakeRequest(3, prompt(8, 2))
    driver.admit(tail)
    decode = driver.run([(tail, 1)], score=prompt_score(tail, 0, 1, want_top)).score
    np.testing.assert_allclose(decode.values, table[0, request.prompt[1]], atol=1e-5)


def test_sampled_logprobs_are_of_the_scaled_and_penalised_distribution(driver):
    rows = [
        SlotSampling(temperature=0.7, seed=3, logprob_ids=(1, 2)),
        SlotSampling(bias_ids=(9,), bias_values=(30.0,)),
        SlotSampling(),
    ]
    requests = [driver.admit(FakeRequest(i, prompt(i, 4), row)) for i, row in enumerate(rows)]
    outcome = driver.run([(r, 4) for r in requests], full=True, logprobs=True)
    logits = np.stack([context_logits(r.prompt, HEAD) for r in requests])
    logits[0] /= 0.7
    logits[1, 9] += 30
    expected = np.stack([log_softmax(row) for row in logits])
    tokens, found = outcome.token_ids, outcome.logprobs
    assert tokens[1] == 9 and tokens[2] == logits[2].argmax()
    np.testing.assert_allclose(found.chosen, expected[np.arange(3), tokens], atol=1e-5)
    np.testing.assert_allclose(found.id_values[0, :2], expected[0, [1, 2]], atol=1e-5)
    assert (found.top_ids[:, 0] == logits.argmax(axis=1)).all()
    assert found.chosen[1] == found.top_values[1, 0]
    for request in requests:  # the same numbers from the greedy variant
        request.outputs.clear()
    again = driver.admit(FakeRequest(3, requests[2].prompt))
    outcome = driver.run([(again, 4)], logprobs=True)
    np.testing.assert_allclose(outcome.logprobs.chosen, expected[2].max(), atol=1e-5)
    assert (outcome.logprobs.top_ids[0] == found.top_ids[2]).all()


def penalised(prompt, count, row):
    """Greedy under penalties, one token after the other."""
    ids, outputs = list(prompt), []
    for _ in range(count):
        logits = context_logits(ids, HEAD).astype(np.float64)
        counts = np.bincount(outputs, minlength=VOCAB)
        logits -= row.frequency_penalty * counts + row.presence_penalty * (counts > 0)
        repeated = np.where(logits > 0, logits / row.repetition_penalty, logits)
        repeated = np.where(logits <= 0, logits * row.repetition_penalty, repeated)
        logits = np.where(counts > 0, repeated, logits)
        if len(outputs) < row.min_new_tokens:
            logits[list(row.stop_ids)] = -np.inf
        outputs.append(int(logits.argmax()))
        ids.append(outputs[-1])
    return outputs


def test_penalty_counts_live_on_device_and_are_rebuilt_at_resumption(driver):
    row = SlotSampling(
        frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.8, min_new_tokens=12
    )
    ids = prompt(3, 6)
    row = dataclasses.replace(row, stop_ids=tuple(penalised(ids, 25, row)[:3]))
    expected = penalised(ids, 25, row)
    assert expected != greedy(ids, 25)
    other = driver.admit(FakeRequest(0, prompt(1, 2)))
    request = driver.admit(FakeRequest(3, ids, row))
    driver.run([(other, 2), (request, 6)], full=True)
    for _ in range(12):
        driver.run([(other, 0), (request, 0)], full=True)
    assert request.outputs == expected[:13]
    assert other.outputs == greedy(other.prompt, 13), "its neighbour has no penalties"
    # Retracted, and resumed in another slot: outputs come back as input, counts from the edit.
    resumed = FakeRequest(1, ids, row, outputs=list(request.outputs))
    driver.admit(resumed, resumed=resumed.outputs)
    driver.run([(resumed, 16)])
    driver.run([(resumed, 3)], full=True)
    for _ in range(8):
        driver.run([(resumed, 0)], full=True)
    assert resumed.outputs == expected[: 13 + 9]


def test_counts_of_more_outputs_than_one_upload_holds(driver):
    row = SlotSampling(frequency_penalty=0.5)
    outputs = [7] * 1500 + [8] * 40
    request = FakeRequest(2, prompt(1, 4), row)
    driver.admit(request, resumed=outputs)
    outcome = driver.run([(request, 4)], full=True, logprobs=True)
    logits = context_logits(request.prompt, HEAD).astype(np.float64)
    logits[7] -= 750
    logits[8] -= 20
    expected = log_softmax(logits)
    np.testing.assert_allclose(outcome.logprobs.top_values[0, 0], expected.max(), atol=1e-4)
    assert 8 not in outcome.logprobs.top_ids[0]


def test_a_count_of_many_outputs_does_not_wrap(driver):
    row = SlotSampling(frequency_penalty=-0.001)  # favours what was generated
    request = FakeRequest(2, prompt(1, 4), row)
    request.outputs[:] = [7] * (MOST_COUNTED - 1)
    driver.admit(request, resumed=list(request.outputs))
    driver.run([(request, 4)], full=True)
    for _ in range(3):
        driver.run([(request, 0)], full=True)
    assert request.outputs[-4:] == [7] * 4
    assert int(driver.runner._state.counts[request.slot, 7]) == MOST_COUNTED


def test_more_edits_than_one_upload_holds(driver):
    requests = [driver.admit(FakeRequest(i, prompt(i, 2))) for i in range(4)]
    plan = driver.plan([(r, 2) for r in requests])
    assert len(list(driver.runner._programs.edit_layout.pack(plan.edits))) == 2
    flight = driver.runner.launch(plan)
    driver.runner.finish(flight)
    driver.record([(r, 2) for r in requests], plan, flight)
    for request in requests:
        assert request.outputs == greedy(request.prompt, 1)


def test_a_grammar_mask_decides_even_a_greedy_step(driver):
    requests = [driver.admit(FakeRequest(i, prompt(i, 3))) for i in range(3)]
    mask = np.zeros((3, VOCAB // 32), np.int32)
    mask[0, 1], mask[1, 0], mask[2] = 1 << 5, -(2**31), -1
    outcome = driver.run([(r, 3) for r in requests], mask=mask)
    assert outcome.token_ids.tolist() == [37, 31, greedy(requests[2].prompt, 1)[0]]


def test_nan_logits_are_minus_one_and_the_next_step_survives(driver):
    row = SlotSampling(bias_ids=(3,), bias_values=(float("nan"),))
    bad, good = (
        driver.admit(FakeRequest(0, prompt(0, 3), row)),
        driver.admit(FakeRequest(1, prompt(5, 3))),
    )
    outcome = driver.run([(bad, 3), (good, 3)], full=True)
    assert outcome.token_ids.tolist() == [-1, greedy(good.prompt, 1)[0]]
    assert driver.run([(bad, 0), (good, 0)], full=True).token_ids[0] == -1
    assert good.outputs == greedy(good.prompt, 2)


def test_a_seed_gives_the_same_answer_alone_and_in_company(driver):
    row = SlotSampling(seed=77, temperature=1.1, top_k=30, top_p=0.9)
    alone = driver.admit(FakeRequest(0, prompt(1, 5), row))
    driver.run([(alone, 5)], full=True)
    for _ in range(10):
        driver.run([(alone, 0)], full=True)
    others = [
        driver.admit(FakeRequest(i, prompt(i, 3), SlotSampling(seed=i, temperature=2.0)))
        for i in (1, 2)
    ]
    driver.run([(r, 3) for r in others], full=True)
    busy = driver.admit(FakeRequest(3, prompt(1, 5), row))
    driver.run([(others[0], 0), (others[1], 0), (busy, 3)], full=True)
    driver.run([(others[1], 0), (busy, 2)], full=True)
    for _ in range(10):
        driver.run([(others[0], 0), (busy, 0), (others[1], 0)], full=True)
    assert busy.outputs == alone.outputs
    assert len(set(alone.outputs)) > 2


def random_sampling(generator):
    pick = generator.random
    return SlotSampling(
        seed=int(generator.integers(-(2**63), 2**63 - 1)),
        temperature=float(generator.choice([0.0, 0.5, 1.0, 1.7])),
        top_p=float(generator.choice([0.3, 0.9, 1.0])),
        min_p=float(generator.choice([0.0, 0.1])),
        frequency_penalty=float(generator.uniform(-2, 2)) if pick() < 0.3 else 0.0,
        presence_penalty=float(generator.uniform(-2, 2)) if pick() < 0.3 else 0.0,
        repetition_penalty=float(generator.uniform(0.5, 2)) if pick() < 0.3 else 1.0,
        top_k=int(generator.choice([1, 3, 40, TOP_K_ALL])),
        min_new_tokens=int(generator.integers(0, 4)),
        stop_ids=tuple(generator.permutation(VOCAB)[: generator.integers(0, 6)].tolist()),
        bias_ids=tuple(range(generator.integers(0, VOCAB))),
        bias_values=(),
        logprob_ids=tuple(generator.integers(0, VOCAB, generator.integers(0, 32)).tolist()),
    )


def test_no_parameter_and_no_batch_causes_a_compilation(driver):
    """300 random steps under recompile_guard=error, with all tokens of greedy requests checked."""
    generator = np.random.default_rng(0)
    running, kinds, checked = [], set(), 0
    for step in range(300):
        slots = sorted(set(range(4)) - {r.slot for r in running})
        new = []
        if slots and generator.random() < 0.4:
            plain = generator.random() < 0.5
            row = SlotSampling() if plain else random_sampling(generator)
            row = dataclasses.replace(row, bias_values=(0.5,) * len(row.bias_ids))
            request = FakeRequest(slots[0], prompt(step, int(generator.integers(1, 12))), row)
            driver.admit(request, resumed=prompt(step, 5) if generator.random() < 0.2 else ())
            new = [(request, len(request.prompt))]
        if not running and not new:
            continue
        work = [(r, 0) for r in running] + new
        score = None
        if new and len(new[0][0].prompt) > 1 and generator.random() < 0.5:
            count = len(new[0][0].prompt) - 1
            score = prompt_score(new[0][0], 0, count, generator.random() < 0.5, len(running))
        mask = None
        if generator.random() < 0.2:
            mask = np.full((len(work), VOCAB // 32), -1, np.int32)
        full, logprobs = True, generator.random() < 0.3
        driver.run(work, mask, full=full, logprobs=logprobs, score=score)
        kinds.add((len(work), bool(new), logprobs, mask is not None, score is not None))
        running += [request for request, _ in new]
        for request in list(running):
            if len(request.ids) > 40 or generator.random() < 0.05:
                running.remove(request)
                driver.free += request.pages
                if request.sampling == SlotSampling():
                    assert request.outputs == greedy(request.prompt, len(request.outputs))
                    checked += 1
    assert driver.runner.recompiles == 0 and len(kinds) > 20 and checked > 5


def test_a_failed_launch_is_survived_by_reset(driver, monkeypatch):
    request = driver.admit(FakeRequest(0, prompt(1, 5)))
    driver.run([(request, 5)])
    kv = driver.runner._kv
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", None)
        with pytest.raises(TypeError):
            driver.runner.launch(driver.plan([(request, 0)]))
    for leaf in jax.tree.leaves((kv, driver.runner._state)):
        leaf.delete()  # what a launch that fails on the device leaves behind
    with pytest.raises((RuntimeError, ValueError)):
        driver.run([(request, 0)])
    driver.runner.reset()
    again = Driver(driver.runner)
    resumed = again.admit(FakeRequest(0, request.prompt))
    again.run([(resumed, 5)])
    again.run([(resumed, 0)])
    assert resumed.outputs == greedy(request.prompt, 2)
    assert driver.runner.recompiles == 0


@pytest.mark.parametrize("tensor", [2])
def test_a_sharded_model_gives_the_same_tokens(tensor):
    runner = make_runner(tensor, num_slots=2)
    assert len(runner._kv.k.sharding.device_set) == tensor
    assert runner._kv.k.addressable_shards[0].data.shape[2] == 1, "KV heads are split"
    driver = Driver(runner)
    row = SlotSampling(seed=5, temperature=1.0, top_p=0.9)
    a, b = (
        driver.admit(FakeRequest(0, prompt(1, 6))),
        driver.admit(FakeRequest(1, prompt(2, 4), row)),
    )
    driver.run([(a, 6)])
    outcome = driver.run([(a, 0), (b, 4)], full=True, logprobs=True)
    for _ in range(4):
        driver.run([(a, 0), (b, 0)], full=True)
    assert a.outputs == greedy(a.prompt, 6)
    expected = log_softmax(context_logits([*a.prompt, a.outputs[0]], HEAD)).max()
    np.testing.assert_allclose(outcome.logprobs.chosen[0], expected, atol=1e-5)
    runner.close()


def test_wrong_dtypes_and_sizes_are_refused_before_the_upload(driver):
    request = driver.admit(FakeRequest(0, prompt(1, 3)))
    plan = driver.plan([(request, 3)])
    wide = dataclasses.replace(plan, kv_lens=plan.kv_lens.astype(np.int64))
    with pytest.raises(AssertionError, match="dtype"):
        driver.runner.launch(wide)
    short = dataclasses.replace(plan, q_lens=plan.q_lens - 1)
    with pytest.raises(AssertionError):
        driver.runner.launch(short)
    long = dataclasses.replace(plan, token_ids=np.zeros(99, np.int32))
    with pytest.raises(AssertionError):
        driver.runner.launch(long)


class HeldBack:
    """A lowered program that compiles only once the gate is open."""

    def __init__(self, lowered, gate):
        self.lowered, self.gate = lowered, gate

    def compile(self, *args, **kwargs):
        assert self.gate.wait(120)
        return self.lowered.compile(*args, **kwargs)


READY = {
    *(Key("init"), Key("edit"), Key("recount"), Key("score", 16)),
    *(Key("forward", 4), Key("forward", 16, True), Key("head", 4, True, True)),
}


@pytest.fixture
def waiting(monkeypatch):
    """A runner that is ready, all of whose other programs are still compiling; and their gate."""
    gate, lower = threading.Event(), Program.lower
    monkeypatch.setattr(
        Program,
        "lower",
        lambda self: lower(self) if self.key in READY else HeldBack(lower(self), gate),
    )
    runner = make_runner()
    yield runner, gate
    gate.set()
    runner.manifest.wait_all()
    runner.close()


def test_every_step_is_served_at_once_while_the_rest_compiles(waiting):
    runner, gate = waiting
    assert set(runner._ready) == READY
    done = serve_everything(runner)
    assert set(runner._ready) == READY and not gate.is_set(), "nothing was waited for"
    gate.set()
    runner.manifest.wait_all()
    runner.reset()
    names = {"edit", "recount", "forward", "head", "score"}
    calls = []
    for key in [key for key in runner._ready if key.name in names]:
        runner._ready[key] = spy(runner._ready[key], key, calls)
    assert serve_everything(runner) == done, "the cheaper programs give the same answers"
    assert {Key("head", n, full) for n in (1, 2, 4) for full in (False, True)} <= set(calls)
    assert Key("head", 2, True, True) in calls and Key("score", 2) in calls
    assert runner.recompiles == 0


def spy(program, key, calls):
    def call(*args):
        calls.append(key)
        return program(*args)

    return call


def serve_everything(runner):
    """Steps of every kind, variant and row count; what they answered."""
    answers = []

    def take(outcome):
        numbers = () if outcome.logprobs is None else outcome.logprobs.top_ids.tolist()
        score = None if outcome.score is None else np.round(outcome.score.values, 4).tolist()
        answers.append((outcome.token_ids.tolist(), numbers, score))

    for full, logprobs in itertools.product((False, True), repeat=2):
        driver = Driver(runner)
        running = []
        for slot in range(4):
            row = SlotSampling(seed=slot, temperature=0.8 if full else 0.0)
            new = driver.admit(FakeRequest(slot, prompt(slot, 5), row), resumed=prompt(slot, 3))
            work = [(r, 0) for r in running]
            score = prompt_score(new, 0, 4, want_top=full, offset=slot)
            take(driver.run([*work, (new, 5)], full=full, logprobs=logprobs, score=score))
            running.append(new)
            work = [(r, 0) for r in running]
            take(driver.run(work, full=full, logprobs=logprobs))
        mask = np.full((4, VOCAB // 32), -1, np.int32)
        take(driver.run(work, mask, full=full, logprobs=logprobs))
        driver = Driver(runner)
        tail = driver.admit(FakeRequest(0, prompt(8, 2)))
        score = prompt_score(tail, 0, 1, want_top=logprobs)
        take(driver.run([(tail, 1)], score=score))
    return answers


def test_the_manifest_holds_no_program_twice_and_plain_traffic_comes_first(shared):
    made = shared._programs
    keys = [p.key for p in (*startup.required(made), *startup.others(made))]
    assert len(set(keys)) == len(keys) == shared.compiled[1] == 3 + 3 + 4 + 3 * 3 + 4
    assert {p.key for p in startup.required(made)} == READY
    assert keys[7:10] == [Key("head", rows) for rows in (1, 2, 4)]
    assert [key.name for key in keys[-4:]] == ["head", "score", "score", "score"]


def test_start_up_logs_a_table_of_every_use_of_memory(caplog):
    with caplog.at_level("INFO", logger="jserve.runner"):
        runner = make_runner(num_slots=1, chunked_prefill_size=4)
    for name in ("weights", "KV pool: 400 tokens in 100 pages", "slot state", "step temporaries"):
        assert name in caplog.text
    assert runner.num_pages == 101
    runner.close()
