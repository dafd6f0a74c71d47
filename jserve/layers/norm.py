"""Root-mean-square normalisation over the last axis, in float32 whatever the model's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """x / rms(x) · (offset + w); `offset` is 1 where the checkpoint keeps scale − 1 (Gemma)."""

    def __init__(self, weight: nnx.Param, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weight, eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = self.weight[...].astype(jnp.float32) + self.offset
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)
