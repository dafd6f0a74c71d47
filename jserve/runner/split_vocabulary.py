"""Sampling where the vocabulary is split over devices: sampling.py and logprobs.py, by shards.

Each device has the logits of its own tokens, and alone applies penalties, biases and masks to them.
Owns the few numbers that devices then tell each other; what they make of them is the same on all.
Its answers are those of one device up to the rounding of sums, and to the bit where none is taken.

    greedy    one gather of [N, 2]: best logit, its id
    sample    that; one of [N, 2] and 8 of [N, 30], sums for top-k and top-p; one of the blocks'
              sums [N, B / S]; one reduction of the drawn block [N, 128]
    columns   one gather of [N, 74]: the sum, the best tokens, the asked ones
    unscaled  one gather as greedy's

Legend as in sampling.py, and: S shards, W = V' / S columns of one, whole blocks; columns of no
token come last. Functions named _… run on one shard, inside shard_map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve import sampling
from jserve.batch import SlotParams
from jserve.runner import logprobs
from jserve.sampling import LANES
from jserve.types import MAX_TOP_LOGPROBS
from pallas_kernels.filter_search import NO_LIMIT
from sharding.rules import Rules

DIGIT = 4  # bits of the limit that one round finds
_ROUNDS = 8  # 31 bits of a float32 without its sign
_INFINITY = 0x7F800000  # bits


class SplitVocabulary:
    """`vocab` tokens over the mesh axis of the logical axis `vocab`; logits and distances are split
    [N, V'], everything else is whole on each device.
    """

    def __init__(self, rules: Rules, vocab: int) -> None:
        axis = rules.mapping["vocab"]
        assert axis is not None, "the vocabulary is not split"
        self._rules, self._vocab, self._axis = rules, vocab, axis
        self._split, self._whole = rules.spec((None, "vocab")), rules.spec(())

    def greedy(self, logits: jax.Array, mask: jax.Array) -> jax.Array:
        """As sampling.greedy; the mask is whole."""

        def best(logits: jax.Array, mask: jax.Array) -> jax.Array:
            return self._best(self._tokens_only(sampling.allowed(logits, mask)))[1]

        specs = (self._split, self._split)
        return self._on_shards(best, specs, self._whole)(logits, self._padded(mask, logits))

    def sample(
        self,
        logits: jax.Array,
        params: SlotParams,
        counts: jax.Array,
        index: jax.Array,
        mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """As sampling.sample; `counts` are split like the logits, the mask is whole."""
        specs = (self._split, self._whole, self._split, self._whole, self._split)
        run = self._on_shards(self._sample, specs, (self._whole, self._split))
        return run(logits, params, counts, index, self._padded(mask, logits))

    def columns(self, distance: jax.Array, chosen: jax.Array, ids: jax.Array) -> jax.Array:
        """As logprobs.columns."""
        specs = (self._split, self._whole, self._whole)
        with jax.named_scope("logprobs"):
            return self._on_shards(self._columns, specs, self._whole)(distance, chosen, ids)

    def unscaled(self, logits: jax.Array) -> jax.Array:
        """As logprobs.unscaled."""

        def distance(logits: jax.Array) -> jax.Array:
            logits = self._tokens_only(logits)
            return self._best(logits)[0][:, None] - logits

        return self._on_shards(distance, (self._split,), self._split)(logits)

    def _on_shards(self, function: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        return self._rules.on_devices(function, specs, out)

    def _sample(
        self,
        logits: jax.Array,
        params: SlotParams,
        counts: jax.Array,
        index: jax.Array,
        mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        width = logits.shape[1]
        local = dataclasses.replace(
            params,
            stop_ids=self._local_ids(params.stop_ids, width),
            bias_ids=self._local_ids(params.bias_ids, width),
        )
        logits = sampling.constrain(logits, local, counts, index, mask)
        best, best_id = self._best(self._tokens_only(logits))
        distance = sampling.distances(self._tokens_only(logits), params, best)
        with jax.named_scope("filter"):
            weights = sampling.filtered(distance, params, self._limits)
        with jax.named_scope("draw"):
            drawn = self._draw(weights, sampling.uniform(params.seed, index))
        return sampling.choose(params, best, best_id, drawn), distance

    def _padded(self, mask: jax.Array, logits: jax.Array) -> jax.Array:
        """Words for the columns of no token too. Pinned whole, lest shards pad by exchanging."""
        words = jnp.pad(mask, ((0, 0), (0, logits.shape[1] // 32 - mask.shape[1])))
        return self._rules.constrain(words, (None, None))

    def _first(self, width: int) -> jax.Array:
        """The shard's first token."""
        return lax.axis_index(self._axis) * width

    def _tokens_only(self, logits: jax.Array) -> jax.Array:
        """Columns of no token can never be taken."""
        ids = self._first(logits.shape[1]) + jnp.arange(logits.shape[1])
        return jnp.where(ids[None, :] < self._vocab, logits, -jnp.inf)

    def _local_ids(self, ids: jax.Array, width: int) -> jax.Array:
        """Columns of the shard, those of other shards' tokens beyond it and all different."""
        columns = ids - self._first(width)
        here = (columns >= 0) & (columns < width)
        return jnp.where(here, columns, width + jnp.arange(ids.shape[1])[None, :])

    def _best(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the whole vocabulary the best logit and its token, as sampling.argmax has it.

        A gather, because a reduction to the maximum may lose a NaN: here an id of −1 stands for it.
        """
        column = sampling.argmax(logits)
        mine = jnp.where(column < 0, -1, self._first(logits.shape[1]) + column)
        told = lax.all_gather(jnp.stack([logprobs.bits(jnp.max(logits, axis=1)), mine]), self._axis)
        values, ids = lax.bitcast_convert_type(told[:, 0], jnp.float32), told[:, 1]  # [S, N]
        best = jnp.max(values, axis=0)
        best = jnp.where(jnp.all(ids >= 0, axis=0), best, jnp.nan)
        token = jnp.min(jnp.where(values == best[None, :], ids, self._vocab), axis=0)
        return best, jnp.where(token < self._vocab, token, -1)

    def _limits(self, distance: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        """As filter_search.limits, whose search this is, DIGIT bits at a time."""
        nothing, digits = jnp.zeros(len(distance), jnp.int32), jnp.arange(1, 1 << DIGIT)
        budget = top_p * self._below(distance, [nothing | _INFINITY])[0][:, 0]

        def one_round(i: jax.Array, limit: jax.Array) -> jax.Array:
            shift = jnp.int32(DIGIT) * (_ROUNDS - 1 - i)
            bounds = [limit | lax.shift_left(digit, shift) for digit in digits]
            mass, count = self._below(distance, bounds)
            most = lax.shift_right_logical(jnp.int32(0x7FFFFFFF), shift)  # the top digit's last
            fits = (digits <= most)[None, :] & (count < top_k[:, None]) & (mass <= budget[:, None])
            return limit | lax.shift_left(jnp.sum(fits, axis=1, dtype=jnp.int32), shift)

        limit = lax.fori_loop(0, _ROUNDS, one_round, nothing)
        idle = (top_k >= self._vocab) & (top_p >= 1.0)
        return jnp.where(idle, jnp.int32(NO_LIMIT), limit)

    def _below(self, distance: jax.Array, bounds: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """For each bound [N], sum(p) and the number of tokens whose distance has bits under it:
        two of [N, len(bounds)]. Summed in one order, so that a subset never exceeds the whole.
        """
        bits, p = logprobs.bits(distance), jnp.exp(-distance)
        under = [bits < bound[:, None] for bound in bounds]
        mass = [jnp.sum(jnp.where(below, p, 0.0), axis=1) for below in under]
        count = [jnp.sum(jnp.where(below, 1.0, 0.0), axis=1) for below in under]
        told = lax.all_gather(jnp.stack(mass + count, axis=1), self._axis)
        mass, count = jnp.split(jnp.sum(told, axis=0), 2, axis=1)
        return mass, count

    def _draw(self, weights: jax.Array, u: jax.Array) -> jax.Array:
        """As sampling.draw, by the same sums in the same order."""
        sums = lax.all_gather(jnp.sum(weights, axis=2), self._axis, axis=1, tiled=True)  # [N, B]
        block, target = sampling.draw_block(sums, u)
        num_blocks = weights.shape[1]
        here = block - self._first(num_blocks)
        mine = sampling.take(weights, jnp.clip(here, 0, num_blocks - 1))
        mine = jnp.where(((here >= 0) & (here < num_blocks))[:, None], mine, 0.0)
        drawn, _ = sampling.descend(lax.psum(mine, self._axis), target)
        return block * LANES + drawn

    def _columns(self, distance: jax.Array, chosen: jax.Array, ids: jax.Array) -> jax.Array:
        rows, width = distance.shape
        nothing = jnp.zeros(rows)
        values, best = logprobs.top_log_probs(distance, nothing)
        asked = jnp.clip(jnp.concatenate([chosen[:, None], ids], axis=1), 0, self._vocab - 1)
        asked -= self._first(width)
        here = (asked >= 0) & (asked < width)
        found = logprobs.gather_log_probs(distance, nothing, jnp.clip(asked, 0, width - 1))
        found = jnp.where(here, found, 0.0)
        floats = jnp.concatenate([jnp.sum(jnp.exp(-distance), axis=1)[:, None], values, found], 1)
        mine = jnp.concatenate([logprobs.bits(floats), best + self._first(width)], axis=1)
        told = lax.all_gather(mine, self._axis)  # [S, N, 74]
        floats = lax.bitcast_convert_type(told[:, :, : floats.shape[1]], jnp.float32)
        sums, values, found = jnp.split(floats, [1, 1 + MAX_TOP_LOGPROBS], axis=2)
        log_sum = jnp.log(jnp.sum(sums, axis=0))  # [N, 1]
        found = jnp.sum(found, axis=0) - log_sum
        # Shards in order, each best first, lower ids first: so is the choice among equals.
        values = jnp.swapaxes(values, 0, 1).reshape(rows, -1)
        best = jnp.swapaxes(told[:, :, -MAX_TOP_LOGPROBS:], 0, 1).reshape(rows, -1)
        values, place = lax.top_k(values, MAX_TOP_LOGPROBS)
        best = jnp.take_along_axis(best, place, axis=1)
        parts = (found[:, :1], values - log_sum, best, found[:, 1:])
        return jnp.concatenate([p if p is best else logprobs.bits(p) for p in parts], axis=1)
