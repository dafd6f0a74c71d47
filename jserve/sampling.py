"""From logits to tokens: pure functions over rows, no sort of the vocabulary.

Knows the slot's parameters (batch.SlotParams, gathered by row) and nothing of buckets, slots or
plans. Order of work: penalties, logit_bias, min_new_tokens, grammar mask, temperature, softmax,
then top_k, top_p, min_p, then one uniform per row drawn by (seed, output index) and the inverse
CDF. So a row's token depends on its own logits and parameters only.

Legend: N rows, V vocabulary, B = ceil(V / 128) blocks. `distance` is (max logit − logit) divided by
temperature, ≥ 0, +inf where a token is forbidden; p = exp(−distance) is the softmax times its
normaliser, 1 at the best token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jserve import batch
from jserve.batch import SlotParams
from pallas_kernels import filter_search

LANES = 128
Search = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # as filter_search.limits
_GREEDY_BELOW = 1e-6  # temperatures under this are greedy, and their log-probabilities are unscaled


def argmax(logits: jax.Array) -> jax.Array:
    """Best token, the lowest id among equals; −1 where a logit is NaN. [N, V] → int32[N].

    Two plain reductions: on CPU jnp.argmax's one of both does not vectorise (4.0 ms → 0.7).
    """
    vocab = logits.shape[1]
    best = jnp.max(logits, axis=1, keepdims=True)  # NaN wins, and then equals nothing
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    found = jnp.min(jnp.where(logits == best, ids, vocab), axis=1)
    return jnp.where(found < vocab, found, -1)


def greedy(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """The best of the tokens that the mask allows. [N, V], int32 [N, ceil(V / 32)] → int32[N]."""
    return argmax(allowed(logits, mask))


def sample(
    logits: jax.Array,
    params: SlotParams,
    counts: jax.Array,
    index: jax.Array,
    mask: jax.Array,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    """The full sampler: tokens int32[N] (−1: no finite best logit), distance float32 [N, V].

    Args:
        logits: float32 [N, V].
        counts: uint16 [N, V], how often the request has generated each token.
        index: int32[N], how many tokens it has generated.
        mask: int32 [N, ceil(V / 32)], bit i of word j allows token 32 · j + i.
        platform: cpu, gpu or tpu; how top-k and top-p are searched for depends on it.
    """
    logits = constrain(logits, params, counts, index, mask)
    best = jnp.max(logits, axis=1)
    distance = distances(logits, params, best)
    with jax.named_scope("filter"):
        search = filter_search.limits if platform == "gpu" else functools.partial(limits, platform)
        weights = filtered(distance, params, search)
    with jax.named_scope("draw"):
        drawn = draw(weights, uniform(params.seed, index))
    return choose(params, best, argmax(logits), drawn), distance


def choose(params: SlotParams, best: jax.Array, best_id: jax.Array, drawn: jax.Array) -> jax.Array:
    """The best token of greedy rows, else the drawn one; −1 where the best logit is not finite."""
    temperature, top_k = params.floats[:, batch.TEMPERATURE], params.ints[:, batch.TOP_K]
    greedy = (temperature < _GREEDY_BELOW) | (top_k == 1)
    return jnp.where(jnp.isfinite(best), jnp.where(greedy, best_id, drawn), -1)


def constrain(
    logits: jax.Array, params: SlotParams, counts: jax.Array, index: jax.Array, mask: jax.Array
) -> jax.Array:
    """Logits after penalties over generated tokens, logit_bias, min_new_tokens, grammar mask."""
    seen = counts > 0
    penalties = params.floats[:, batch.FREQUENCY : batch.REPETITION + 1, None]
    frequency, presence, repetition = jnp.unstack(penalties, axis=1)
    logits = logits - frequency * counts - jnp.where(seen, presence, 0.0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    rows = jnp.arange(logits.shape[0])[:, None]
    scatter = {"mode": "drop", "unique_indices": True}
    logits = logits.at[rows, params.bias_ids].add(params.bias_values, **scatter)
    too_short = (index < params.ints[:, batch.MIN_NEW_TOKENS])[:, None]
    forbidden = jnp.where(too_short, params.stop_ids, logits.shape[1] + params.stop_ids)
    return allowed(logits.at[rows, forbidden].set(-jnp.inf, **scatter), mask)


def allowed(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits [N, V], −inf where the bit of int32 [N, ceil(V / 32)] is 0."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    bits = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(bits != 0, logits, -jnp.inf)


def distances(logits: jax.Array, params: SlotParams, best: jax.Array) -> jax.Array:
    """(best − logit) / temperature; temperature counts as 1 for greedy rows."""
    temperature = params.floats[:, batch.TEMPERATURE, None]
    temperature = jnp.where(temperature < _GREEDY_BELOW, 1.0, temperature)
    return (best[:, None] - logits) / temperature


def filtered(distance: jax.Array, params: SlotParams, search: Search) -> jax.Array:
    """p = exp(−distance), 0 where top_k, top_p or min_p drops the token. [N, V] → [N, B, 128].

    In descending order of p a token of rank i is dropped where i ≥ top_k, where the sum before it
    exceeds top_p of the whole, or where p < min_p · p_max; equal tokens share their fate. Each rule
    keeps a prefix, so the first two keep `distance` ≤ the largest t with count(distance < t) <
    top_k and sum(p[distance < t]) ≤ top_p · sum(p): both sides grow with t, and distances are ≥ 0,
    so their bits order like integers and t is built bit by bit from the top.
    """
    top_k, top_p = params.ints[:, batch.TOP_K], params.floats[:, batch.TOP_P]
    limit = search(distance, top_k, top_p)[:, None, None]
    distance = blocks(distance, jnp.inf)
    p = jnp.exp(-distance)
    kept = lax.bitcast_convert_type(distance, jnp.int32) <= limit
    return jnp.where(kept & (p >= params.floats[:, batch.MIN_P, None, None]), p, 0.0)


def limits(platform: str, distance: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """As filter_search.limits. Only CPU skips an idle search: elsewhere a loop whose length depends
    on data stalls the dispatching thread."""
    distance = blocks(distance, jnp.inf)
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    p = jnp.exp(-distance)
    # Summed in the order of the search, so that a subset never sums to more than the whole.
    budget = top_p * jnp.sum(lax.optimization_barrier(jnp.sum(p, axis=1)), axis=1)

    def add_bit(i: jax.Array, limit: jax.Array) -> jax.Array:
        candidate = limit | lax.shift_left(jnp.int32(1), jnp.int32(30) - i)
        better = bits < candidate[:, None, None]
        # The barrier keeps the vectorised first reduction from being merged with the second
        # (12 ms at 16 × 49k on CPU, 17 without).
        mass = jnp.sum(jnp.where(better, p, 0.0), axis=1)
        count = jnp.sum(better, axis=1, dtype=jnp.int32)
        count, mass = lax.optimization_barrier((count, mass))
        fits = (jnp.sum(count, axis=1) < top_k) & (jnp.sum(mass, axis=1) <= budget)
        return jnp.where(fits, candidate, limit)

    idle = (top_k >= distance.shape[1] * LANES) & (top_p >= 1.0)
    steps = jnp.where(jnp.all(idle), 0, 31) if platform == "cpu" else 31
    limit = lax.fori_loop(0, steps, add_bit, jnp.zeros(distance.shape[0], jnp.int32))
    return jnp.where(idle, jnp.int32(filter_search.NO_LIMIT), limit)


def uniform(seed: jax.Array, output_index: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, a function of (seed, output index) alone. → float32[N]."""
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.vmap(lambda k, i: jax.random.uniform(jax.random.fold_in(k, i)))(keys, output_index)


def draw(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Inverse CDF: block, then token, never one of weight 0. [N, B, 128], [N] → int32[N]."""
    block, target = draw_block(jnp.sum(weights, axis=2), u)
    return block * LANES + descend(take(weights, block), target)[0]


def draw_block(sums: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Block that `u` falls in, by group of 128 blocks, and target left there. [N, B], [N]."""
    groups = blocks(sums, 0.0)  # [N, G, 128]
    totals = jnp.sum(groups, axis=2)
    group, target = descend(totals, u * jnp.sum(totals, axis=1))
    block, target = descend(take(groups, group), target)
    return group * LANES + block, target


def blocks(rows: jax.Array, fill: float) -> jax.Array:
    """[N, V] → [N, B, 128], padded with `fill`."""
    padding = -rows.shape[1] % LANES
    rows = jnp.pad(rows, ((0, 0), (0, padding)), constant_values=fill)
    return rows.reshape(rows.shape[0], -1, LANES)


def descend(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index whose inclusive sum exceeds the target, and the target left there. [N, M], [N].

    Of positive weight always; the last such index when rounding left none. M is small, so the
    prefix sums are one masked reduction instead of a scan.
    """
    size = weights.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    order = jnp.arange(size)
    upto = (order[None, :] <= order[:, None])[None]
    inclusive = jnp.sum(jnp.where(upto, weights[:, None, :], 0.0), axis=2)
    positive = weights > 0
    hit = positive & (inclusive > target[:, None])
    first = jnp.min(jnp.where(hit, ids, size), axis=1)
    index = jnp.minimum(first, jnp.max(jnp.where(positive, ids, 0), axis=1))
    before = jnp.sum(jnp.where(ids < index[:, None], weights, 0.0), axis=1)
    return index, target - before


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[n, index[n]] for each n. [N, M, 128], [N] → [N, 128]."""
    return jnp.take_along_axis(rows, index[:, None, None], axis=1, mode="clip")[:, 0, :]
