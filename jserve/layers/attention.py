"""Self-attention over the paged KV pool: projections, head layout, and the call of the one op.

Legend: T tokens, C hidden size, H query heads, K stored KV heads, G = H / K, D head_dim.
The fused projection is interleaved by KV head, [C, K · (G + 2) · D]: each KV head's G query heads,
its key, its value. Splitting the axis by KV heads therefore gives every shard whole groups, and
attention itself needs no collective.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from jserve.batch import CallContext
from jserve.layers.linear import Linear
from jserve.layers.norm import RMSNorm
from jserve.layers.rope import Rotary, rotate
from pallas_kernels.attention import KVLayer
from sharding.rules import Rules


class Attention(nnx.Module):
    """`op` is attend of pallas_kernels.attention with this layer's static arguments; where `fused`,
    attend_projection of pallas_kernels.qkv_write."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        sinks: nnx.Param | None,
        *,
        num_kv_heads: int,
        head_dim: int,
        op: Callable[..., tuple[jax.Array, KVLayer]],
        fused: bool,
        rules: Rules,
    ) -> None:
        self.qkv, self.output, self.q_norm, self.k_norm = qkv, output, q_norm, k_norm
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.op, self.fused, self.rules, self.sinks = op, fused, rules, sinks

    def __call__(
        self, x: jax.Array, kv_layer: KVLayer, angles: Rotary, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:  # x [T, C]
        tokens, head_dim = x.shape[0], self.head_dim
        fused = self.qkv(x).reshape(tokens, self.num_kv_heads, -1, head_dim)  # [T, K, G + 2, D]
        heads, whole = self.rules.spec((None, "kv_heads", None)), self.rules.spec(())
        pool = self.rules.spec((None, None, "kv_heads", None))
        layer = KVLayer(pool, None if kv_layer.v is None else pool, whole)  # type: ignore[arg-type]
        if self.fused:
            scales = tuple(n and n.weight[...] for n in (self.q_norm, self.k_norm))
            inputs, specs = (fused, angles, scales), (heads, whole, whole)
        else:
            q, k, v = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q = rotate(q, angles).reshape(tokens, -1, head_dim)
            inputs, specs = (q, rotate(k, angles), v), (heads, heads, heads)
        sinks = None if self.sinks is None else self.sinks[...]  # [H]
        specs = (*specs, layer, whole, self.rules.spec(("kv_heads",)))
        run = self.rules.on_devices(self.op, specs, (heads, layer))
        out, kv_layer = run(*inputs, kv_layer, context.meta, sinks)
        return self.output(out.reshape(tokens, -1)), kv_layer
