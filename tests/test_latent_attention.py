"""Attention over a latent pool: one key a token for all heads, whose first columns are the value.
Every implementation that runs here, against test_attention_op's brute force.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_op import DECODE, LAYER, MIXED, NUM_LAYERS, Batch, Case, brute_force, make_batch

from pallas_kernels.attention import AttentionMeta, KVLayer, attend, mosaic_gpu_latent

IMPLEMENTATIONS = ("reference", "xla", "pallas_triton_interpret")
VALUE_DIM = 64
LATENT = {"kv_heads": 1, "head_dim": VALUE_DIM + 16}

CASES = {
    "decode": Case(DECODE, 4, decode_only=True, group=4, **LATENT),
    "decode of one row": Case(
        ((1, 45),), 1, decode_only=True, spare_rows=0, spare_tokens=0, group=4, **LATENT
    ),
    "decode, more heads than a block": Case(DECODE, 4, decode_only=True, group=72, **LATENT),
    "decode with prompt tails": Case(DECODE, 2, decode_only=True, group=3, **LATENT),
    "decode, pages of one token": Case(
        ((1, 9), (1, 30)), 2, decode_only=True, page_size=1, group=1, **LATENT
    ),
    "mixed": Case(MIXED, 2, group=4, **LATENT),
    "mixed, 20 heads": Case(MIXED, 2, group=20, **LATENT),
    "mixed, pages of one token": Case(((1, 9), (6, 20), (3, 3)), 1, page_size=1, group=2, **LATENT),
    "chunks only, more rows than tokens": Case(
        ((2, 40), (1, 20)), 0, spare_rows=9, spare_tokens=1, group=2, **LATENT
    ),
    "a chunk of many tiles": Case(((1, 3), (70, 190)), 1, spare_tokens=0, group=16, **LATENT),
    "bfloat16": Case(MIXED, 2, dtype="bfloat16", group=8, **LATENT),
}


def latent_batch(case: Case) -> Batch:
    """Values are the whole keys: what a latent pool holds, and a few columns more of output."""
    batch = make_batch(case)
    return dataclasses.replace(batch, v=batch.k, pool_v=batch.pool_k)


def call(case: Case, batch: Batch, implementation: str) -> tuple[np.ndarray, np.ndarray]:
    """Output and pool of one jitted call that donates the pool."""
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS

    def step(q, k, pool, first_page, meta):
        layer = KVLayer(pool, None, first_page, value_dim=VALUE_DIM)
        how = {"scale": case.head_dim**-0.5, "implementation": implementation}
        out, layer = attend(q, k, None, layer, meta, **how)
        assert layer.v is None and layer.value_dim == VALUE_DIM
        return out, layer.k

    arrays = (jnp.array(x, case.dtype) for x in (batch.q, batch.k, batch.pool_k))
    result = jax.jit(step, donate_argnums=2)(*arrays, jnp.int32(LAYER * num_pages), batch.meta)
    out, pool = (np.asarray(x.astype(jnp.float32)) for x in result)
    return out, pool


USUAL = ("decode, more heads than a block", "mixed, 20 heads")


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_equals_brute_force(implementation: str, name: str) -> None:
    case = CASES[name]
    batch = latent_batch(case)
    out, pool = call(case, batch, implementation)
    expected = brute_force(case, batch)[..., :VALUE_DIM]
    assert out.shape == expected.shape
    tolerance = 2e-5 if case.dtype == "float32" else 3e-2
    real = slice(case.num_tokens)
    np.testing.assert_allclose(out[real], expected[real], atol=tolerance, rtol=tolerance)
    assert np.all(out[case.num_tokens :] == 0.0), "padding tokens must be 0, not NaN"

    before = np.asarray(jnp.asarray(batch.pool_k, case.dtype).astype(jnp.float32))
    latent = np.asarray(jnp.asarray(batch.k, case.dtype).astype(jnp.float32))
    wanted, found = (x.reshape(-1, case.head_dim).copy() for x in (before, pool))
    trash = LAYER * before.shape[0] // NUM_LAYERS * case.page_size
    slots = trash + np.asarray(batch.meta.write_slots)[real]
    assert len(set(slots.tolist())) == case.num_tokens
    wanted[slots] = latent[real, 0]
    wanted[trash] = found[trash]
    np.testing.assert_array_equal(found, wanted, "each latent at its slot, nothing else changed")


@pytest.mark.parametrize("decode_only", (True, False))
@pytest.mark.parametrize("tokens", (1, pytest.param(8, marks=pytest.mark.full)))
def test_a_donated_latent_pool_is_never_copied(decode_only: bool, tokens: int) -> None:
    pool = jax.ShapeDtypeStruct((4 * 1000, 16, 1, 80), jnp.float32)
    one = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    starts = jax.ShapeDtypeStruct((tokens + 1,), jnp.int32)
    table = jax.ShapeDtypeStruct((tokens, 32), jnp.int32)
    bounds = jax.ShapeDtypeStruct((2,), jnp.int32)
    most = 1 if decode_only else None
    meta = AttentionMeta(starts, one, table, one, one, one, bounds, max_q_len=most)  # type: ignore[arg-type]
    q = jax.ShapeDtypeStruct((tokens, 4, 80), jnp.float32)

    def step(q, pool, meta):
        for index in range(3):
            layer = KVLayer(pool, None, jnp.int32(1000 * index), value_dim=64)
            out, layer = attend(q, q[:, :1] + 1, None, layer, meta, scale=0.1, implementation="xla")
            q, pool = jnp.concatenate([out, q[..., 64:]], axis=-1), layer.k
        return q, pool

    lowered = jax.jit(step, donate_argnums=1).lower(q, pool, meta)
    memory = lowered.compile().memory_analysis()
    size = pool.size * 4
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 8, f"{memory.temp_size_in_bytes=} {size=}"


@pytest.mark.parametrize("implementation", ("mosaic_tpu", "mosaic_gpu", "jax_triton"))
def test_kernels_without_the_layout_say_so(implementation: str) -> None:
    case = CASES["mixed"]
    with pytest.raises(NotImplementedError, match=implementation):
        call(case, latent_batch(case), implementation)


def test_hoppers_implementation_hands_latents_to_their_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[float, int | None]] = []

    def attention(q: Any, kv_layer: KVLayer, meta: Any, *, scale: float, **how: Any) -> Any:
        given.append((scale, kv_layer.value_dim))
        assert how == {"window": None, "soft_cap": None, "sinks": None}
        return q[..., :VALUE_DIM]

    monkeypatch.setattr(mosaic_gpu_latent, "attention", attention)
    case = CASES["mixed"]
    call(case, latent_batch(case), "mosaic_gpu")
    assert [dim for _, dim in given] == [VALUE_DIM]


@pytest.mark.parametrize("what", ({"window": 8}, {"soft_cap": 2.0}, {"sinks": np.zeros(4)}))
def test_the_gpu_kernel_refuses_what_latent_attention_never_has(what: dict) -> None:
    batch = latent_batch(CASES["mixed"])
    layer = KVLayer(jnp.array(batch.pool_k), None, jnp.int32(0), value_dim=VALUE_DIM)
    with pytest.raises(NotImplementedError, match="latent"):
        how = {"scale": 1.0, "implementation": "pallas_triton_interpret", **what}
        attend(jnp.array(batch.q), jnp.array(batch.k), None, layer, batch.meta, **how)
