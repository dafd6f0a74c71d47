"""Rotary position embedding: angles from positions, once a forward; layers only rotate.

Halves are rotated against each other (element i with i + D/2), as Hugging Face checkpoints expect.
Source: RoFormer (arXiv 2104.09864) §3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotary(NamedTuple):
    """Angles of a step's tokens, shared by all layers of one rope."""

    cos: jax.Array  # [T, D/2] float32
    sin: jax.Array  # [T, D/2] float32


def rotary(positions: jax.Array, frequencies: np.ndarray, factor: float) -> Rotary:
    """At `positions` [T], of `frequencies` [D/2] in radians a position, cos and sin · `factor`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return Rotary(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: jax.Array, angles: Rotary) -> jax.Array:
    """Rotate each head of `x` [T, ..., D] by its token's angles, in float32."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = angles.cos.reshape(shape), angles.sin.reshape(shape)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)
