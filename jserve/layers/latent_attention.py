"""Multi-head latent attention over the paged pool, which keeps one latent and one rotated key of a
token, for all heads. Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.

Legend: T tokens, C hidden size, H query heads, N and P the plain and the rotated columns of a query
head, Q and L the ranks of queries and of the latent, V columns of a value.

A head's key is keys[h] · latent and its value latent · values[h]. Both products move to the other
side of the softmax ("absorbed"): queries meet latents as they lie in the pool, and what comes back
is a weighted latent. So heads share one key, and are all that the tensor axis splits; every device
computes and keeps the same latents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.batch import CallContext
from jserve.layers.linear import Linear
from jserve.layers.norm import RMSNorm
from jserve.layers.rope import Rotary, rotate
from jserve.types import LatentConfig
from pallas_kernels.attention import KVLayer
from sharding.rules import Rules


class LatentAttention(nnx.Module):
    """`op` is attend of pallas_kernels.attention with this layer's static arguments."""

    def __init__(
        self,
        down: Linear,  # [C, Q + L + P]; without Q where queries come straight from the input
        query: Linear,  # [Q or C, H · (N + P)]
        keys: nnx.Param,  # [H, N, L]
        values: nnx.Param,  # [H, L, V]
        output: Linear,  # [H · V, C]
        q_norm: RMSNorm | None,
        latent_norm: RMSNorm,
        *,
        config: LatentConfig,
        op: Callable[..., tuple[jax.Array, KVLayer]],
        rules: Rules,
    ) -> None:
        self.down, self.query, self.output = down, query, output
        self.keys, self.values = keys, values
        self.q_norm, self.latent_norm = q_norm, latent_norm
        self.config, self.op, self.rules = config, op, rules

    def __call__(
        self, x: jax.Array, kv_layer: KVLayer, angles: Rotary, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:  # x [T, C]
        config, tokens = self.config, x.shape[0]
        rank = config.query_rank or 0
        low_q, latent, key = jnp.split(self.down(x), [rank, rank + config.kv_rank], axis=-1)
        q = self.query(x if self.q_norm is None else self.q_norm(low_q))
        plain, rotated = jnp.split(q.reshape(tokens, -1, self._query_dim), [config.nope_dim], -1)
        q = jnp.concatenate([_by_head(plain, self.keys), rotate(rotated, angles)], axis=-1)
        k = jnp.concatenate([self.latent_norm(latent), rotate(key, angles)], axis=-1)
        out, kv_layer = self._attend(q, k[:, None], kv_layer, context)  # [T, H, L]
        return self.output(_by_head(out, self.values).reshape(tokens, -1)), kv_layer

    @property
    def _query_dim(self) -> int:
        return self.config.nope_dim + self.config.rope_dim

    def _attend(
        self, q: jax.Array, k: jax.Array, kv_layer: KVLayer, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:
        """An implementation sees one device's heads."""
        heads, whole = self.rules.spec((None, "heads", None)), self.rules.spec(())
        latent = dataclasses.replace(kv_layer, value_dim=self.config.kv_rank)
        layer = KVLayer(whole, None, whole, latent.value_dim)  # type: ignore[arg-type]
        run = self.rules.on_devices(
            lambda q, k, kv_layer, meta: self.op(q, k, None, kv_layer, meta),
            (heads, whole, layer, whole),
            (heads, layer),
        )
        return run(q, k, latent, context.meta)


def _by_head(x: jax.Array, weight: nnx.Param) -> jax.Array:
    """Each head's [T, I] by its own [I, O]; float32 operands ask for the highest precision."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    how = {"precision": precision, "preferred_element_type": x.dtype}
    return jnp.einsum("thi,hio->tho", x, weight[...], **how)
