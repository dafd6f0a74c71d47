"""The sampler against a plain numpy reference: supports, probabilities, penalties, seeds,
log-probabilities.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve import sampling
from jserve.batch import SlotParams
from jserve.plan import SlotEdit, SlotSampling
from jserve.runner import logprobs
from jserve.runner.inputs import EditLayout
from jserve.types import MAX_TOP_LOGPROBS, TOP_K_ALL

VOCAB = 300  # not a multiple of the block


def params_of(*rows: SlotSampling, vocab: int = VOCAB) -> SlotParams:
    """Through the packing that serving uses, so that columns and paddings are its own."""
    layout = EditLayout(len(rows), 1, 0, vocab)
    none = np.zeros(0, np.int32)
    (packed,) = layout.pack([SlotEdit(i, none, row, none) for i, row in enumerate(rows)])
    fields = layout.split(packed)
    return SlotParams(
        seed=jnp.asarray(fields.seed.view(np.uint32)),
        floats=jnp.asarray(np.ascontiguousarray(fields.floats).view(np.float32)),
        ints=jnp.asarray(fields.ints),
        stop_ids=jnp.asarray(fields.stop_ids),
        bias_ids=jnp.asarray(fields.bias_ids),
        bias_values=jnp.asarray(np.ascontiguousarray(fields.bias_values).view(np.float32)),
        logprob_ids=jnp.asarray(fields.logprob_ids),
    )


@functools.partial(jax.jit, static_argnames="skip")
def run_sample(logits, params, counts, index, mask, skip=True):
    return sampling.sample(logits, params, counts, index, mask, platform="cpu" if skip else "tpu")


def sample(logits, params, counts=None, index=None, mask=None, skip=True):
    n, vocab = logits.shape
    counts = np.zeros((n, vocab), np.uint16) if counts is None else counts
    index = np.zeros(n, np.int32) if index is None else np.asarray(index, np.int32)
    mask = np.full((n, -(-vocab // 32)), -1, np.int32) if mask is None else mask
    tokens, distance = run_sample(jnp.asarray(logits), params, counts, index, mask, skip)
    return np.asarray(tokens), np.asarray(distance)


@jax.jit
def run_filtered(distance, params):
    kept = sampling.filtered(distance, params, functools.partial(sampling.limits, "cpu"))
    return kept.reshape(kept.shape[0], -1)[:, : distance.shape[1]]


def softmax(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def reference_support(p, top_k, top_p, min_p):
    """Kept ids, and those within rounding of a threshold, of one row."""
    order = np.argsort(-p, kind="stable")
    ranked = p[order]
    before = np.cumsum(ranked) - ranked
    rank = np.arange(len(p))
    kept = (rank < top_k) & (before <= top_p) & (ranked >= min_p * ranked[0])
    unsure = np.abs(before - top_p) < 1e-5
    unsure |= np.abs(ranked - min_p * ranked[0]) < 1e-6 * ranked[0]
    return set(order[kept].tolist()), set(order[unsure].tolist())


rows = st.builds(
    lambda seed, scale, k, p, m: (seed, scale, k, p, m),
    st.integers(0, 10**6),
    st.sampled_from([0.3, 1.0, 4.0, 15.0]),
    st.sampled_from([1, 2, 7, 50, VOCAB, TOP_K_ALL]),
    st.sampled_from([1e-4, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=4, max_size=4))
def test_top_k_top_p_min_p_keep_what_the_sorted_reference_keeps(drawn):
    logits = np.stack(
        [np.random.default_rng(s).normal(size=VOCAB).astype(np.float32) * x for s, x, *_ in drawn]
    )
    params = params_of(
        *(SlotSampling(temperature=1.0, top_k=k, top_p=p, min_p=m) for _, _, k, p, m in drawn)
    )
    distance = logits.max(axis=1, keepdims=True) - logits
    kept = np.asarray(run_filtered(jnp.asarray(distance), params))
    for row, (_, _, top_k, top_p, min_p) in enumerate(drawn):
        p = softmax(-distance[row])
        expected, unsure = reference_support(p, top_k, top_p, min_p)
        found = set(np.flatnonzero(kept[row]).tolist())
        assert found - unsure == expected - unsure
        assert found, "the best token is always kept"
        ids = sorted(found)
        np.testing.assert_allclose(kept[row, ids], np.exp(-distance[row, ids]), rtol=1e-5)


def test_equal_logits_share_their_fate():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, :10] = 1.0
    params = params_of(*(SlotSampling(temperature=1.0, top_k=k) for k in (3, 11)))
    kept = np.asarray(run_filtered(jnp.asarray(logits.max() - logits), params))
    assert np.flatnonzero(kept[0]).tolist() == list(range(10))
    assert np.count_nonzero(kept[1]) == VOCAB


@pytest.mark.parametrize(
    "row",
    [
        SlotSampling(temperature=1.0),
        SlotSampling(temperature=0.5),
        SlotSampling(temperature=2.0, top_k=4),
        SlotSampling(temperature=1.0, top_p=0.8),
        SlotSampling(temperature=1.0, min_p=0.2),
        SlotSampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
def test_drawn_tokens_follow_the_filtered_distribution(row):
    vocab, draws = 12, 4096
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 1.5
    p = softmax(logits / row.temperature)
    kept, _ = reference_support(p, row.top_k, row.top_p, row.min_p)
    p = np.where(np.isin(np.arange(vocab), list(kept)), p, 0)
    p /= p.sum()
    # One seed, many output indices: the way one long answer draws.
    params = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), params_of(row, vocab=vocab))
    tokens, _ = sample(np.tile(logits, (draws, 1)), params, index=np.arange(draws))
    seen = np.bincount(tokens, minlength=vocab)
    assert set(np.flatnonzero(seen)) <= kept
    chance = p > 0
    statistic = np.sum((seen - draws * p)[chance] ** 2 / (draws * p)[chance])
    assert statistic < 2 * chance.sum() + 25, f"{statistic=} {seen=}"


def test_a_seed_draws_the_same_token_in_any_row_and_bucket():
    generator = np.random.default_rng(0)
    row = SlotSampling(seed=-(2**61) - 12345, temperature=1.0, top_k=40, top_p=0.95)
    other = SlotSampling(seed=9, temperature=1.3)
    logits = generator.normal(size=VOCAB).astype(np.float32) * 3
    seen = set()
    for bucket in (1, 4, 16):
        for place in {0, bucket // 2, bucket - 1}:
            batch = generator.normal(size=(bucket, VOCAB)).astype(np.float32)
            batch[place] = logits
            rows = [other] * bucket
            rows[place] = row
            index = generator.integers(0, 99, bucket)
            index[place] = 7
            seen.add(int(sample(batch, params_of(*rows), index=index)[0][place]))
    assert len(seen) == 1
    again = [int(sample(logits[None], params_of(row), index=[i])[0][0]) for i in range(20)]
    assert len(set(again)) > 3, "the output index moves the draw"


def test_seeds_differ_in_all_64_bits():
    seeds = [0, 1, 2**32, 2**32 + 1, -1, -(2**63), 2**63 - 1]
    params = params_of(*(SlotSampling(seed=s, temperature=1.0) for s in seeds))
    u = np.asarray(sampling.uniform(params.seed, jnp.zeros(len(seeds), jnp.int32)))
    assert len(set(u.tolist())) == len(seeds)
    key = jax.random.fold_in(jax.random.key(1), 0)
    assert u[1] == jax.random.uniform(key)
    assert ((u >= 0) & (u < 1)).all()


def test_draw_is_right_at_the_ends_of_the_interval():
    weights = np.zeros((3, 3, 128), np.float32)
    weights[:, 0, 5] = weights[:, 2, 100] = 1.0
    weights[:, 1, 1] = 1e-12  # lost in the sums
    u = np.array([0.0, np.nextafter(np.float32(0.5), 0), 1 - 2**-24], np.float32)
    assert np.asarray(sampling.draw(weights, u)).tolist() == [5, 5, 2 * 128 + 100]


def test_draw_never_takes_a_token_of_weight_zero():
    generator = np.random.default_rng(1)
    weights = np.exp(generator.normal(size=(64, 5, 128)) * 6).astype(np.float32)
    weights[generator.random(weights.shape) < 0.9] = 0
    weights[:, 3, 3] = 1e-3
    flat = weights.reshape(64, -1)
    for u in (0.0, 0.3, 0.999999, 1 - 2**-24):
        tokens = np.asarray(sampling.draw(weights, np.full(64, u, np.float32)))
        assert (flat[np.arange(64), tokens] > 0).all()
        inclusive = np.cumsum(flat.astype(np.float64), axis=1)
        target = u * inclusive[:, -1]
        slack = 1e-5 * inclusive[:, -1]
        below = inclusive[np.arange(64), tokens] - flat[np.arange(64), tokens]
        assert (below <= target + slack).all()
        assert (inclusive[np.arange(64), tokens] >= target - slack).all()


def reference_constrain(x, counts, row, index):
    x = x.astype(np.float64).copy()
    x -= row.frequency_penalty * counts + row.presence_penalty * (counts > 0)
    repeated = np.where(x > 0, x / row.repetition_penalty, x * row.repetition_penalty)
    x = np.where(counts > 0, repeated, x)
    for token, value in zip(row.bias_ids, row.bias_values, strict=True):
        x[token] += value
    if index < row.min_new_tokens:
        x[list(row.stop_ids)] = -np.inf
    return x


def test_penalties_bias_and_min_new_tokens_follow_the_contract():
    generator = np.random.default_rng(5)
    rows = [
        SlotSampling(frequency_penalty=0.5),
        SlotSampling(presence_penalty=-1.5, repetition_penalty=1.3),
        SlotSampling(repetition_penalty=0.7, bias_ids=(0, VOCAB - 1), bias_values=(5.0, -100.0)),
        SlotSampling(min_new_tokens=4, stop_ids=(1, 2, VOCAB - 1)),
        SlotSampling(min_new_tokens=3, stop_ids=(1, 2)),
        SlotSampling(bias_ids=tuple(range(300)), bias_values=tuple(np.linspace(-9, 9, 300))),
    ]
    logits = generator.normal(size=(len(rows), VOCAB)).astype(np.float32) * 4
    counts = generator.integers(0, 4, logits.shape).astype(np.uint16)
    index = np.full(len(rows), 3, np.int32)
    mask = np.full((len(rows), -(-VOCAB // 32)), -1, np.int32)
    found = sampling.constrain(jnp.asarray(logits), params_of(*rows), counts, index, mask)
    for i, row in enumerate(rows):
        expected = reference_constrain(logits[i], counts[i], row, 3)
        np.testing.assert_allclose(np.asarray(found)[i], expected, rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.asarray(found)[3, [1, 2, VOCAB - 1]]).all()
    assert np.isfinite(np.asarray(found)[4]).all()


def test_the_grammar_mask_forbids_every_token_whose_bit_is_off():
    generator = np.random.default_rng(2)
    allowed = generator.random((3, VOCAB)) < 0.1
    bits = np.zeros((3, -(-VOCAB // 32) * 32), bool)
    bits[:, :VOCAB] = allowed
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = generator.normal(size=(3, VOCAB)).astype(np.float32)
    rows = [SlotSampling(), SlotSampling(temperature=1.5), SlotSampling(temperature=1.0, top_k=5)]
    for index in range(20):
        tokens, distance = sample(logits, params_of(*rows), index=[index] * 3, mask=mask)
        assert allowed[np.arange(3), tokens].all()
    assert (np.isinf(distance) == ~allowed).all()
    assert tokens[0] == np.where(allowed[0], logits[0], -np.inf).argmax()


def test_greedy_rows_beside_sampling_rows_take_the_argmax():
    logits = np.random.default_rng(8).normal(size=(3, VOCAB)).astype(np.float32)
    rows = [SlotSampling(), SlotSampling(temperature=5.0), SlotSampling(temperature=2.0, top_k=1)]
    tokens, distance = sample(logits, params_of(*rows))
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()
    np.testing.assert_allclose(distance[1], (logits[1].max() - logits[1]) / 5, rtol=1e-5)
    np.testing.assert_allclose(distance[0], logits[0].max() - logits[0], rtol=1e-5)


def test_nan_and_hopeless_rows_give_minus_one_and_spare_their_neighbours():
    logits = np.random.default_rng(8).normal(size=(4, VOCAB)).astype(np.float32)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    rows = [SlotSampling(temperature=t) for t in (1.0, 1.0, 1.0, 0.0)]
    tokens, _ = sample(logits, params_of(*rows))
    assert tokens[1] == tokens[2] == -1
    assert tokens[0] >= 0 and tokens[3] == logits[3].argmax()
    assert np.asarray(sampling.argmax(logits[:2])).tolist() == [logits[0].argmax(), -1]


def test_argmax_takes_the_lowest_of_equals():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [40, 200]] = 3.0
    assert np.asarray(sampling.argmax(logits)).tolist() == [0, 40]


def test_the_idle_filter_shortcut_changes_nothing():
    logits = np.random.default_rng(4).normal(size=(4, VOCAB)).astype(np.float32)
    rows = params_of(*(SlotSampling(seed=i, temperature=0.9) for i in range(4)))
    assert (sample(logits, rows, skip=True)[0] == sample(logits, rows, skip=False)[0]).all()


@pytest.mark.parametrize("vocab", [VOCAB, 40, 5000])
def test_log_probabilities_are_those_of_log_softmax(vocab):
    logits = np.random.default_rng(6).normal(size=(3, vocab)).astype(np.float32) * 5
    logits[1, :30] = 9.0  # ties: lower ids first
    distance = jnp.asarray(logits.max(axis=1, keepdims=True) - logits)
    log_sum = logprobs.log_normaliser(distance)
    values, ids = map(np.asarray, logprobs.top_log_probs(distance, log_sum))
    expected = np.log(np.stack([softmax(row) for row in logits]))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    assert (ids == order).all()
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, axis=1), atol=1e-4)
    chosen = np.asarray(logprobs.gather_log_probs(distance, log_sum, jnp.asarray(order[:, :3])))
    assert (chosen == values[:, :3]).all(), "one value, one rounding"
