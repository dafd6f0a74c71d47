"""Sampling by shards of the vocabulary answers as sampling on one device does."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import params_of
from tiny_models import rules_of

from jserve import sampling
from jserve.plan import SlotSampling
from jserve.runner import logprobs
from jserve.runner.split_vocabulary import SplitVocabulary
from jserve.types import TOP_K_ALL

VOCAB = 1300  # no multiple of a block, a word or a shard
ROWS = 24


def random_rows(rng):
    """Every parameter in some row, with all of the vocabulary's ends among the ids."""
    ends = (0, 127, 128, 511, 512, 767, 768, 1023, 1024, VOCAB - 1)
    return [
        SlotSampling(
            seed=int(rng.integers(-(2**63), 2**63 - 1)),
            temperature=float(rng.choice([0.0, 0.4, 1.0, 2.5])),
            top_k=int(rng.choice([1, 3, 40, VOCAB, TOP_K_ALL])),
            top_p=float(rng.choice([0.2, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.02])),
            frequency_penalty=float(rng.choice([0.0, 0.7])),
            presence_penalty=float(rng.choice([0.0, -0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
            min_new_tokens=int(rng.integers(0, 8)),
            stop_ids=tuple(rng.permutation(ends)[: rng.integers(0, 9)].tolist()),
            bias_ids=ends,
            bias_values=tuple(rng.normal(size=len(ends)).tolist()),
            logprob_ids=ends[: rng.integers(0, 9)],
        )
        for _ in range(ROWS)
    ]


@functools.cache
def sharded(mesh, name):
    """One method of SplitVocabulary, compiled for a mesh of (tensor, expert)."""
    return jax.jit(getattr(SplitVocabulary(rules_of(*mesh), VOCAB), name))


def split(array, mesh):
    """Columns appended, full of what must never be taken, and the whole split over devices."""
    block = 128 * mesh[0] * mesh[1]
    padded = np.pad(array, ((0, 0), (0, -VOCAB % block)), constant_values=99)
    return jax.device_put(padded, rules_of(*mesh).sharding((None, "vocab")))


def whole(array, mesh):
    return jax.device_put(array, rules_of(*mesh).sharding())


@functools.partial(jax.jit, static_argnames="platform")
def on_one_device(logits, params, counts, index, mask, platform="cpu"):
    tokens, distance = sampling.sample(logits, params, counts, index, mask, platform=platform)
    return tokens, distance, logprobs.columns(distance, tokens, params.logprob_ids)


MESHES = [(2, 2), *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ((2, 1), (8, 1)))]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_parameter_gives_the_tokens_and_log_probabilities_of_one_device(mesh):
    rng = np.random.default_rng(1)
    rows = params_of(*random_rows(rng), vocab=VOCAB)
    drawn = set()
    for scale in (0.5, 3.0, 9.0):
        logits = (rng.normal(size=(ROWS, VOCAB)) * scale).astype(np.float32)
        counts = rng.integers(-8, 3, logits.shape).clip(0).astype(np.uint16)
        index = rng.integers(0, 12, ROWS).astype(np.int32)
        mask = rng.integers(-(2**31), 2**31 - 1, (ROWS, -(-VOCAB // 32)), dtype=np.int32)
        mask[::2] = -1
        tokens, distance, columns = on_one_device(logits, rows, counts, index, mask)
        arguments = (split(logits, mesh), whole(rows, mesh), split(counts, mesh))
        given = (*arguments, whole(index, mesh), whole(mask, mesh))
        found, apart = sharded(mesh, "sample")(*given)
        np.testing.assert_array_equal(found, tokens)
        np.testing.assert_array_equal(np.asarray(apart)[:, :VOCAB], distance)
        assert np.isinf(np.asarray(apart)[:, VOCAB:]).all(), "appended columns are never tokens"
        told = sharded(mesh, "columns")(apart, found, whole(rows.logprob_ids, mesh))
        ours, theirs = logprobs.read(np.asarray(told)), logprobs.read(np.asarray(columns))
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
        for name in ("chosen", "top_values", "id_values"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5)
        drawn |= set((np.asarray(found) // (apart.shape[1] // math.prod(mesh))).tolist())
    assert len(drawn) > math.prod(mesh) // 2, "tokens of several shards were taken"


FOUR = MESHES[0]


def test_ties_nan_and_hopeless_rows_are_those_of_one_device():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1, [700, 200, 1299]] = 3.0
    logits[2, 768:1152] = np.nan  # all of one shard
    logits[3] = -np.inf
    logits[4] = -np.inf
    logits[4, 1299] = -5.0
    logits[5] = np.nan
    logits[6, 1000] = 9.0
    only = np.full((ROWS, -(-VOCAB // 32)), -1, np.int32)
    only[6] = 0
    only[6, [12, 30]] = 1 << 5  # tokens 389 and 965
    best = sharded(FOUR, "greedy")(split(logits, FOUR), whole(only, FOUR))
    assert best.tolist()[:7] == [0, 200, -1, 0, 1299, -1, 389]
    alone = sampling.greedy(jnp.asarray(logits), jnp.asarray(only))
    assert best.tolist()[3:] == alone.tolist()[3:]
    temperatures = (0, 0, 1, 1, 1, *[0] * (ROWS - 5))
    rows = params_of(*[SlotSampling(temperature=t) for t in temperatures], vocab=VOCAB)
    counts, index = np.zeros((ROWS, VOCAB), np.uint16), np.zeros(ROWS, np.int32)
    mask = np.full((ROWS, -(-VOCAB // 32)), -1, np.int32)
    given = (
        split(logits, FOUR),
        whole(rows, FOUR),
        split(counts, FOUR),
        whole(index, FOUR),
        whole(mask, FOUR),
    )
    tokens, distance = sharded(FOUR, "sample")(*given)
    assert tokens.tolist()[:6] == [0, 200, -1, -1, 1299, -1]
    told = sharded(FOUR, "columns")(distance, tokens, whole(rows.logprob_ids, FOUR))
    ids = logprobs.read(np.asarray(told)).top_ids
    assert ids[1, :5].tolist() == [200, 700, 1299, 0, 1], "lower ids first among equals"


def test_distances_of_scores_are_not_scaled():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    found = np.asarray(sharded(FOUR, "unscaled")(split(logits, FOUR)))
    np.testing.assert_array_equal(found[:, :VOCAB], logits.max(axis=1, keepdims=True) - logits)
    assert np.isinf(found[:, VOCAB:]).all()
