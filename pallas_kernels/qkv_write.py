"""From the fused projection to attention's input, in one kernel on GPUs: query and key norms,
rotation, and keys and values into their pages. XLA takes six launches for it.

Knows the projection's layout ([T, K, G + 2, D]: each KV head's queries, key, value), slots and
pools, nothing of rows or requests. Written for Pallas's Triton backend; interpretable on CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import attend
from pallas_kernels.attention.batch import AttentionMeta, KVLayer
from pallas_kernels.float8 import stored

_SMALL = 1024  # tokens up to which a program takes few of them, so that all of the card has work


def attend_projection(
    fused: jax.Array,  # [T, K, G + 2, D]
    angles: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    kv_layer: KVLayer,
    meta: AttentionMeta,
    sinks: jax.Array | None = None,
    *,
    eps: float,
    offset: float,
    **how: Any,
) -> tuple[jax.Array, KVLayer]:
    """`attend` of the projection's normed and rotated heads; `how` are its keywords."""
    with jax.named_scope("write_qkv"):
        q, kv_layer = write_qkv(
            fused, *angles, *scales, kv_layer, meta.write_slots, eps=eps, offset=offset
        )
    return attend(q, None, None, kv_layer, meta, sinks, **how)


def write_qkv(
    fused: jax.Array,  # [T, K, G + 2, D]
    cos: jax.Array,  # [T, D / 2] float32
    sin: jax.Array,
    q_scale: jax.Array | None,  # [D] of the norms; None: no norm
    k_scale: jax.Array | None,
    kv_layer: KVLayer,  # donated by the program, or else copied
    slots: jax.Array,  # [T] page · page_size + offset, layer offset not included
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[jax.Array, KVLayer]:
    """Queries [T, H, D], and the layer with this step's keys and values at `slots`.

    A norm is x / rms(x) · (offset + scale). Every step is float32 and rounded to the model's dtype
    where separate layers would round. Slots are as write_pages' own.
    """
    tokens, kv_heads, width, head_dim = fused.shape
    assert kv_layer.v is not None and kv_layer.k.shape[3] == head_dim, f"{kv_layer.k.shape=}"
    block, warps = (4, 1) if tokens <= _SMALL else (16, 4)
    block = min(block, pl.next_power_of_2(tokens))
    norms = [] if q_scale is None or k_scale is None else [q_scale, k_scale]
    inputs = (kv_layer.first_page.reshape(1), slots, cos, sin, fused, *norms)
    pools = (kv_layer.k, kv_layer.v)
    queries, k, v = pl.pallas_call(
        functools.partial(_kernel, block=block, eps=eps, offset=offset, normed=bool(norms)),
        grid=(width, kv_heads, pl.cdiv(tokens, block)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * (width - 2), head_dim), fused.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="write_qkv",
    )(*inputs, *pools)
    return queries, KVLayer(k, v, kv_layer.first_page)


def _kernel(
    first_page_ref: Any,  # [1]
    slots_ref: Any,  # [T]
    cos_ref: Any,  # [T, D / 2]
    sin_ref: Any,
    fused_ref: Any,  # [T, K, G + 2, D]
    *refs: Any,  # norms [D], [D] if any; pools (aliased); queries [T, H, D], the pools again
    block: int,
    eps: float,
    offset: float,
    normed: bool,
) -> None:
    queries_ref, k_ref, v_ref = refs[-3:]
    member, head, (num_tokens, _, width, head_dim) = (
        pl.program_id(0), pl.program_id(1), fused_ref.shape
    )  # fmt: skip
    group, half = width - 2, head_dim // 2
    # Tokens past the end are copies of the last one: they write the same to the same place.
    token = jnp.minimum(pl.program_id(2) * block + jnp.arange(block), num_tokens - 1)
    low, high = slice(0, half), slice(half, head_dim)

    def at(index: int | jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.int32(index), token.shape)

    place = (token, at(head), at(member))

    def turned(scale_ref: Any) -> tuple[jax.Array, jax.Array]:
        cos, sin = cos_ref[token, :], sin_ref[token, :]
        a = fused_ref[(*place, low)].astype(jnp.float32)  # [block, D / 2]
        b = fused_ref[(*place, high)].astype(jnp.float32)
        if scale_ref is not None:
            squares = jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)
            factor = jax.lax.rsqrt(squares / head_dim + eps)[:, None]
            scale_a = scale_ref[low].astype(jnp.float32) + offset
            scale_b = scale_ref[high].astype(jnp.float32) + offset
            dtype = fused_ref.dtype
            a = (a * factor * scale_a[None, :]).astype(dtype).astype(jnp.float32)
            b = (b * factor * scale_b[None, :]).astype(dtype).astype(jnp.float32)
        return a * cos - b * sin, b * cos + a * sin

    def slot() -> tuple[jax.Array, ...]:
        page_size, index = jnp.int32(k_ref.shape[1]), slots_ref[token]
        page = jax.lax.div(index, page_size) + first_page_ref[0]
        return page, jax.lax.rem(index, page_size), at(head)

    @pl.when(member < group)
    def _query() -> None:
        a, b = turned(refs[0] if normed else None)
        target = (token, at(head * group + member))
        queries_ref[(*target, low)] = a.astype(queries_ref.dtype)
        queries_ref[(*target, high)] = b.astype(queries_ref.dtype)

    @pl.when(member == group)
    def _key() -> None:
        a, b = turned(refs[1] if normed else None)
        target = slot()  # rounded to the projection's dtype first, as the queries are
        k_ref[(*target, low)] = stored(a.astype(fused_ref.dtype), k_ref.dtype)
        k_ref[(*target, high)] = stored(b.astype(fused_ref.dtype), k_ref.dtype)

    @pl.when(member > group)
    def _value() -> None:
        target = slot()
        v_ref[(*target, low)] = stored(fused_ref[(*place, low)], v_ref.dtype)
        v_ref[(*target, high)] = stored(fused_ref[(*place, high)], v_ref.dtype)
