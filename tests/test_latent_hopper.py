"""Hopper's kernel for prefill over a latent pool, without one: its code in threads on CPU against
the reference, and its lowering for a card.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params
from jax._src.state.types import TransposeTransform
from jax.experimental import pallas as pl
from test_attention_op import LAYER, NUM_LAYERS, Case, make_batch

from pallas_kernels.attention import (
    KVLayer,
    mosaic_gpu_latent,
    pallas_triton_latent,
    reference,
)

plgpu = mosaic_gpu_latent.plgpu
MIXED = ((1, 30), (3, 9), (5, 150))  # a decode row, a row shorter than a tile, one with a prefix
CASES = {
    16: (MIXED, 3),
    8: (((1, 130), (19, 300), (9, 9)), 5),
    128: (((1, 7), (2, 70), (1, 140)), 3),
    64: (((20, 145),), 2),
}


class Accumulator:
    """Sums as a value; one that is live goes with every loop's state."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    def __getitem__(self, _: Any) -> jax.Array:
        return self.value

    def __setitem__(self, _: Any, value: jax.Array) -> None:
        self.value = value


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without layouts, accumulators that are written and transposed operands, of which the
    interpreter knows nothing.
    """
    live: list[Accumulator] = []

    def multiply(acc: Accumulator, a: Any, b: Any) -> None:
        *rest, last = b.transforms
        turned = isinstance(last, TransposeTransform)
        b = type(b)(b.ref, tuple(rest))[...].T if turned else b[...]
        acc.value += jnp.dot(a[...].astype(jnp.float32), b.astype(jnp.float32))

    def scoped(run: Any, acc: Any) -> Any:
        live.append(Accumulator(jnp.zeros(acc.shape, acc.dtype)))
        result = run(live[-1])
        live.pop()
        return result

    def fori_loop(begin: Any, end: Any, body: Any, state: Any) -> Any:
        ours = tuple(live)

        def with_sums(i: jax.Array, carried: Any) -> Any:
            state, sums = carried
            for acc, value in zip(ours, sums, strict=True):
                acc.value = value
            return body(i, state), [acc.value for acc in ours]

        sums = [acc.value for acc in ours]
        state, sums = jax.lax.fori_loop(begin, end, with_sums, (state, sums))
        for acc, value in zip(ours, sums, strict=True):
            acc.value = value
        return state

    iota = jax.lax.broadcasted_iota
    monkeypatch.setattr(plgpu, "wgmma", multiply)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    monkeypatch.setattr(mosaic_gpu_latent, "_load", lambda ref, layout: ref[...])
    monkeypatch.setattr(plgpu, "broadcasted_iota", lambda *what, layout: iota(*what))
    for name, module, changed in (
        ("pl", pl, {"run_scoped": scoped}),
        ("lax", jax.lax, {"fori_loop": fori_loop}),
    ):
        names = types.SimpleNamespace(**{**vars(module), **changed})
        monkeypatch.setattr(mosaic_gpu_latent, name, names)


def make(heads: int, rows: tuple[tuple[int, int], ...], spare: int) -> tuple[Any, KVLayer, Any]:
    """Queries, a pool that holds their keys too and is NaN elsewhere, and the batch."""
    num_decode = next((i for i, (new, _) in enumerate(rows) if new > 1), 0)
    case = Case(
        rows, num_decode, 1, heads, mosaic_gpu_latent.VALUE_DIM + mosaic_gpu_latent.REST_DIM,
        spare_tokens=spare,
    )  # fmt: skip
    batch = make_batch(case)
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS
    pool = np.array(batch.pool_k)
    slots = np.asarray(batch.meta.write_slots)[: case.num_tokens] + LAYER * num_pages * 16
    pool.reshape(-1, case.head_dim)[slots] = batch.k[: case.num_tokens, 0]
    q, pool = (jnp.asarray(x, jnp.bfloat16) for x in (batch.q, pool))
    layer = KVLayer(pool, None, jnp.int32(LAYER * num_pages), mosaic_gpu_latent.VALUE_DIM)
    return q, layer, batch.meta


@pytest.mark.parametrize(
    "heads", [h if h == 16 else pytest.param(h, marks=pytest.mark.full) for h in CASES]
)
def test_hoppers_kernel_computes_the_same_in_threads_on_cpu(heads: int, on_cpu: None) -> None:
    rows, spare = CASES[heads]
    q, layer, meta = make(heads, rows, spare)
    how = {"scale": 0.05, "processors": 1 if heads == 16 else 2}
    # jax 0.12 calls a copy that waited for its last reader's barrier a race, which 0.10 does not.
    older = jax.version.__version_info__ < (0, 12)
    with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=older)):
        out = jax.jit(lambda *a: mosaic_gpu_latent.prefill(*a, **how))(q, layer, meta)
    assert not (older and interpret_pallas_call.get_races().races_found)
    out, starts = np.asarray(out, np.float32), np.asarray(meta.cu_q_lens)
    expected = reference.attention(q.astype(jnp.float32), layer, meta, scale=0.05)
    served = 0
    for row, (new, _) in enumerate(rows):
        mine = slice(starts[row], starts[row + 1])
        if row >= meta.distribution[0] and new >= mosaic_gpu_latent.queries_of_a_tile(heads):
            served += 1
            error = np.linalg.norm(out[mine] - expected[mine])
            assert error < 4e-3 * np.linalg.norm(expected[mine]), f"{rows[row]=} {error=}"
    assert served and not np.any(out[starts[-1] :]), "padding tokens are 0"


@pytest.mark.parametrize("heads", (16, pytest.param(128, marks=pytest.mark.full)))
@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)  # by threads and by warpgroups
def test_hoppers_kernel_can_be_lowered_without_a_card(
    heads: int, semantics: plgpu.LoweringSemantics, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = plgpu.CompilerParams
    monkeypatch.setattr(
        plgpu, "CompilerParams", lambda **how: chosen(**how, lowering_semantics=semantics)
    )
    q, layer, meta = make(heads, MIXED, 2)
    how = {"scale": 0.05, "processors": 132}
    traced = jax.jit(lambda *a: mosaic_gpu_latent.prefill(*a, **how)).trace(q, layer, meta)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_rows_that_another_kernel_served_stay_as_they_are() -> None:
    q, layer, meta = make(8, MIXED, 2)
    how: dict[str, Any] = {"scale": 0.05, "interpret": True}
    expected = np.asarray(reference.attention(q.astype(jnp.float32), layer, meta, scale=0.05))
    starts = np.asarray(meta.cu_q_lens)
    for shorter_than in (1, 5):
        out = jnp.full((*q.shape[:2], mosaic_gpu_latent.VALUE_DIM), 7.0, q.dtype)
        out = pallas_triton_latent.attention(
            q, layer, meta, **how, out=out, shorter_than=shorter_than
        )
        for row, (new, _) in enumerate(MIXED):
            mine = slice(starts[row], starts[row + 1])
            ours = row < meta.distribution[0] or new < shorter_than
            wanted = expected[mine] if ours else np.full_like(expected[mine], 7.0)
            np.testing.assert_allclose(np.asarray(out[mine], np.float32), wanted, atol=3e-2)


def test_other_latents_and_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=2)
    monkeypatch.setattr(mosaic_gpu_latent.jax, "devices", lambda: [card])
    meta: Any = types.SimpleNamespace(max_q_len=None)
    for heads, columns, dtype, what in (
        (16, 576, "float32", "bfloat16"),
        (16, 320, "bfloat16", "head_dim"),
        (12, 576, "bfloat16", "heads"),
        (96, 576, "bfloat16", "heads"),
    ):
        q, pool = jnp.zeros((600, heads, columns), dtype), jnp.zeros((2, 16, 1, columns), dtype)
        layer = KVLayer(pool, None, jnp.int32(0), columns - 64)
        with pytest.raises(NotImplementedError, match=what):
            mosaic_gpu_latent.attention(q, layer, meta, scale=1.0)
