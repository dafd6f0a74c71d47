"""Joins the partial softmaxes that the splits of one context leave behind."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def combine_splits(
    weighted: jax.Array, maximum: jax.Array, total: jax.Array, sinks: jax.Array | None = None
) -> jax.Array:
    """Normalised values [R, H, D] in float32; 0 for a row whose every split was empty.

    Args:
        weighted: [R, splits, H, D] sum of exp2(score − maximum) · value over the split's keys.
        maximum: [R, splits, H] largest score in base 2; very negative when the split is empty.
        total: [R, splits, H] sum of exp2(score − maximum); 0 when the split is empty.
        sinks: [H] float32 logits, base e, of keys without value.
    """
    largest = jnp.max(maximum, axis=1, keepdims=True)
    weights = jnp.exp2(maximum - largest)
    total = jnp.sum(total * weights, axis=1)
    if sinks is not None:  # infinite where it outweighs every key beyond float32: the result is 0
        total += jnp.exp2(sinks[None, :] * math.log2(math.e) - largest[:, 0])
    return jnp.sum(weighted * weights[..., None], axis=1) / jnp.maximum(total, 1e-30)[..., None]
