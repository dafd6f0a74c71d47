"""The one attention op: a ragged batch of queries over a paged KV pool.

Legend: T tokens, R rows, H query heads, K kv heads, G = H / K, D head_dim, P pages a row can hold,
L layers.

Rows are sorted: the first `distribution[0]` rows have exactly one token (decode), rows up to
`distribution[1]` are real, the rest is padding. Tokens of a row are consecutive and are the last
ones of its context: token i of row r sits at position kv_lens[r] − q_lens[r] + i and attends to
positions ≤ its own (and > its own − window).
"""

from __future__ import annotations

import dataclasses
import functools

import jax

from pallas_kernels.attention.batch import AttentionMeta, KVLayer, interleave_heads
from pallas_kernels.attention.implementations import IMPLEMENTATIONS, ORDERS
from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_write import write_pages

__all__ = ["IMPLEMENTATIONS", "ORDERS", "AttentionMeta", "KVLayer", "attend"]


def attend(
    q: jax.Array,  # [T, H, D]
    k: jax.Array | None,  # [T, K, D]; None: the pool holds this step's keys and values
    v: jax.Array | None,  # [T, K, D]; None also with a latent layout
    kv_layer: KVLayer,
    meta: AttentionMeta,
    sinks: jax.Array | None = None,  # [H] logit of a virtual key without value, per head
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, KVLayer]:
    """Write this step's keys and values at meta.write_slots, then attend to each row's context.

    Scores are q·k · scale, then soft_cap · tanh(scores / soft_cap), accumulated in float32; the
    result [T, H, D of a value] has q's dtype. Rows of padding tokens are 0. The pool is updated in
    place when the program donates it; the returned KVLayer replaces it. Raises as `dispatch`.

    Args:
        window: a token at position p sees positions in (p − window, p]; None: all up to p.
        implementation: of IMPLEMENTATIONS; None: the first of ORDERS[platform] that serves.
        platform: what the program is compiled for; None: this process's default backend, which is
            wrong when compiling ahead of time for another one.
    """
    (tokens, heads, head_dim), rows = q.shape, meta.kv_lens.shape[0]
    fused = kv_layer.v is None and kv_layer.value_dim is None
    assert heads % (kv_layer.k.shape[2] // (2 if fused else 1)) == 0, f"{heads=}"
    assert kv_layer.k.shape[3] >= head_dim, f"{kv_layer.k.shape=} {head_dim=}"
    assert len({(x.shape, x.dtype) for x in (kv_layer.k, kv_layer.v) if x is not None}) == 1
    assert meta.cu_q_lens.shape == (rows + 1,), f"{meta.cu_q_lens.shape=} {rows=}"
    assert meta.page_table.shape[0] == rows, f"{meta.page_table.shape=} {rows=}"
    per_token = {x.shape for x in (meta.positions, meta.token_rows, meta.write_slots)}
    assert per_token == {(tokens,)}, f"{per_token=} {tokens=}"
    assert meta.max_q_len in (None, 1) and (window is None or window > 0), f"{window=}"
    if k is not None:
        assert len(k) == tokens and (v is None or v.shape == k.shape), f"{k=} {v=} {tokens=}"
        with jax.named_scope("kv_write"):
            slots = kv_layer.first_page * kv_layer.k.shape[1] + meta.write_slots
            keys = interleave_heads(k, v) if fused and v is not None else k
            values = None if v is None or kv_layer.v is None else write_pages(kv_layer.v, v, slots)
            keys = write_pages(kv_layer.k, keys, slots)
            kv_layer = dataclasses.replace(kv_layer, k=keys, v=values)
    with jax.named_scope("attend"):
        calls = {
            name: functools.partial(
                call, q, kv_layer, meta, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
            )
            for name, call in IMPLEMENTATIONS.items()
        }
        return dispatch(calls, ORDERS, name=implementation, platform=platform), kv_layer
