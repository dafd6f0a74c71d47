"""Log-probabilities: the columns that head and score programs write, and the host reads.

One int32 array, so that one copy brings it home: chosen, 20 top values, 20 top ids, 32 values of
asked ids; values are float bits. `distance` and V, N, B as in sampling.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jserve.plan import SampledLogprobs
from jserve.sampling import LANES, blocks
from jserve.types import MAX_TOP_LOGPROBS


def columns(distance: jax.Array, chosen: jax.Array, ids: jax.Array) -> jax.Array:
    """int32 [N, 73] of the `chosen` token, the best ones and the asked `ids` of each row."""
    with jax.named_scope("logprobs"):
        log_sum = log_normaliser(distance)
        values, best = top_log_probs(distance, log_sum)
        chosen = gather_log_probs(distance, log_sum, chosen[:, None])
        asked = gather_log_probs(distance, log_sum, ids)
        return jnp.concatenate([bits(chosen), bits(values), best, bits(asked)], axis=1)


def read(out: np.ndarray) -> SampledLogprobs:
    """Copies of the columns."""
    ends = np.cumsum([1, MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS])
    chosen, top_values, top_ids, id_values = (
        np.ascontiguousarray(part) for part in np.split(out, ends, axis=1)
    )
    floats = np.float32
    return SampledLogprobs(
        chosen[:, 0].view(floats), top_values.view(floats), top_ids, id_values.view(floats)
    )


def unscaled(logits: jax.Array) -> jax.Array:
    """Distances at temperature 1."""
    return jnp.max(logits, axis=1, keepdims=True) - logits


def log_normaliser(distance: jax.Array) -> jax.Array:
    """log sum(exp(−distance)), so that a log-probability is −distance − this. [N, V] → [N]."""
    return jnp.log(jnp.sum(jnp.exp(-distance), axis=1))


def gather_log_probs(distance: jax.Array, log_sum: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probabilities of `ids`, clipped to the vocabulary. int32 [N, M] → float32 [N, M]."""
    return -jnp.take_along_axis(distance, ids, axis=1, mode="clip") - log_sum[:, None]


def top_log_probs(distance: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The MAX_TOP_LOGPROBS best values and their ids, lower ids first among equals.

    The best n tokens lie in the n blocks with the best maxima, so only those are ordered.
    """
    values = blocks(-distance, -jnp.inf)
    num_blocks = min(MAX_TOP_LOGPROBS, values.shape[1])
    _, chosen = lax.top_k(jnp.max(values, axis=2), num_blocks)
    chosen = jnp.sort(chosen, axis=1)
    candidates = jnp.take_along_axis(values, chosen[:, :, None], axis=1)
    top, place = lax.top_k(candidates.reshape(values.shape[0], -1), MAX_TOP_LOGPROBS)
    ids = jnp.take_along_axis(chosen, place // LANES, axis=1) * LANES + place % LANES
    return top - log_sum[:, None], ids.astype(jnp.int32)


def bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
