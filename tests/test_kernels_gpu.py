"""The GPU kernels beside attention, interpreted on CPU, and how Hopper's prefill deals its work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import sampling
from jserve.layers.rope import Rotary, rotate
from jserve.runner.buckets import Key
from jserve.runner.startup import _GPU_SPLIT, compiler_options
from pallas_kernels import filter_search, qkv_write
from pallas_kernels.attention import AttentionMeta, KVLayer, mosaic_gpu, mosaic_tiles
from pallas_kernels.kv_write import write_pages
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

EPS, OFFSET = 1e-6, 1.0


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(mean_square + EPS)
    whole = (scale.astype(jnp.float32) + OFFSET)[None, None, :]
    return (wide * factor * whole.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim", "page_size", "dtype", "norms", "kv_dtype"),
    [
        (5, 2, 4, 64, 16, "float32", True, "float32"),
        (1, 2, 2, 32, 1, "float32", False, "float32"),
        (19, 1, 3, 128, 8, "bfloat16", True, "bfloat16"),
        (19, 1, 3, 64, 8, "bfloat16", False, "float8_e4m3fn"),
        (5, 2, 2, 64, 16, "float32", False, "float8_e5m2"),
    ],
)
def test_the_fused_write_equals_norm_rotation_and_scatter(
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    norms: bool,
    kv_dtype: str,
) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    fused = normal(tokens, kv_heads, group + 2, head_dim)
    angles = Rotary(*(normal(tokens, head_dim // 2, dtype="float32") for _ in range(2)))
    scales = (normal(head_dim), normal(head_dim)) if norms else (None, None)
    if "float8" in kv_dtype:  # beyond what it holds, and no number at all
        fused = fused.at[0, :, -1].set(1e6).at[-1, :, -2, 0].set(jnp.nan)
    pools = tuple(normal(20, page_size, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2))
    slots = jnp.asarray(rng.permutation(10 * page_size)[:tokens], jnp.int32)
    layer = KVLayer(pools[0], pools[1], jnp.int32(10))
    q, written = jax.jit(
        lambda *a: qkv_write.write_qkv(*a, eps=EPS, offset=OFFSET, interpret=True)
    )(fused, *angles, *scales, layer, slots)
    queries, keys, values = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
    if scales[0] is not None and scales[1] is not None:
        queries, keys = normed(queries, scales[0]), normed(keys, scales[1])
    expected = (
        rotate(queries, angles).reshape(tokens, -1, head_dim),
        write_pages(pools[0], rotate(keys, angles), slots + 10 * page_size),
        write_pages(pools[1], values, slots + 10 * page_size),
    )
    if "float8" in kv_dtype:
        most = np.asarray(expected[2].astype(jnp.float32))
        assert np.nanmax(most) == float(jnp.finfo(kv_dtype).max)
        assert np.isnan(np.asarray(expected[1].astype(jnp.float32))).any()
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert written.v is not None
    for ours, theirs in zip((q, written.k, written.v), expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=tolerance
        )


@pytest.mark.parametrize("vocab", (512, 1000))
@pytest.mark.parametrize("digit", (2, 3))
def test_the_search_keeps_what_a_sort_keeps(vocab: int, digit: int) -> None:
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((6, vocab)).astype(np.float32)
    distance = logits.max(axis=1, keepdims=True) - logits
    distance[:, 5] = np.inf
    top_k = np.array([1, 5, vocab, vocab, 50, vocab + 5], np.int32)
    top_p = np.array([1.0, 0.9, 0.5, 1.0, 0.3, 0.0], np.float32)
    arguments = [jnp.asarray(x) for x in (distance, top_k, top_p)]
    found = np.asarray(filter_search.limits(*arguments, interpret=True, digit=digit, chunk=256))
    for row in range(len(distance)):
        ordered = np.sort(distance[row])
        p = np.exp(-ordered.astype(np.float64))
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        kept = (np.arange(vocab) < top_k[row]) & (before <= top_p[row] * p.sum() * (1 + 1e-7))
        ours = (distance[row].view(np.int32) <= found[row]) & np.isfinite(distance[row])
        assert ours.sum() == (kept & np.isfinite(ordered)).sum(), f"{row=}"
    plain = np.asarray(sampling.limits("tpu", *arguments))
    bits, allowed = distance.view(np.int32), np.isfinite(distance)
    ours, theirs = ((bits <= limit[:, None]) & allowed for limit in (found, plain))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("queries", "least", "served"),
    [(mosaic_gpu.TILE, mosaic_gpu.HALF, (2, 3, 5)), (4, 4, (2, 3, 4, 5)), (1, 1, (2, 3, 4, 5))],
)
def test_hopper_tiles_hold_every_query_of_the_longer_rows_once_longest_first(
    queries: int, least: int, served: tuple[int, ...]
) -> None:
    q_lens, kv_lens = [1, 1, 64, 200, 5, 130, 0], [4, 5, 64, 300, 9, 130, 0]
    starts, none = np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32(0)
    starts, kv_lens, distribution = (jnp.asarray(x, jnp.int32) for x in (starts, kv_lens, [2, 6]))
    meta = AttentionMeta(starts, kv_lens, none, none, none, none, distribution)
    how = {"queries": queries, "least": least}
    tiles = np.asarray(mosaic_tiles.tile_table(meta, jnp.int32(7), sum(q_lens) // least + 1, **how))
    count = tiles[0, 6]
    held = [
        (row, query)
        for row, offset, _, q_len, *_ in tiles[:count]
        for query in range(offset, min(offset + queries, q_len))
    ]
    assert sorted(held) == [(row, i) for row in served for i in range(q_lens[row])]
    lengths = tiles[:count, 4] - tiles[:count, 3] + tiles[:count, 1]
    assert sorted(lengths, reverse=True) == lengths.tolist()
    assert (tiles[:, 5] == 7).all() and (tiles[:, 7] == sum(q_lens)).all()


@pytest.mark.parametrize("total", (0, 1, 5, 13, 39, 40, 51))
def test_every_tile_is_dealt_to_one_processor(total: int) -> None:
    processors = 13
    numbers = []
    for processor in range(processors):
        me = jnp.int32(processor)
        own = int(mosaic_tiles.num_dealt(jnp.int32(total), me, processors))
        numbers += [int(mosaic_tiles.dealt(jnp.int32(i), me, processors)) for i in range(own)]
    assert sorted(numbers) == list(range(total))


def test_other_chips_leave_hoppers_kernel_to_the_next_implementation() -> None:
    pool = jnp.zeros((4, 16, 1, 64), jnp.bfloat16)
    one = jnp.zeros(1, jnp.int32)
    meta = AttentionMeta(jnp.zeros(2, jnp.int32), one, one[None], one, one, one, jnp.zeros(2, int))
    with pytest.raises(NotImplementedError, match="Hopper"):
        layer = KVLayer(pool, pool, jnp.int32(0))
        mosaic_gpu.attention(pool[:1, 0], layer, meta, scale=1.0)


def test_only_a_gpus_small_programs_search_for_matmul_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = Rules(make_mesh(jax.devices()[:1]), TP)
    assert compiler_options(rules, Key("forward", 64)) is None
    monkeypatch.setattr(Rules, "platform", "gpu")
    small, large = (compiler_options(rules, Key("forward", n)) for n in (8, 64))
    assert small is not None and "xla_gpu_autotune_level" not in small
    assert large is not None and large["xla_gpu_autotune_level"] == 0
    assert small.keys().isdisjoint(_GPU_SPLIT)
    split = compiler_options(Rules(make_mesh(jax.devices()[:2], tensor=2), TP), Key("forward", 8))
    assert split == small | _GPU_SPLIT
