"""The attention op: one suite over every implementation that runs here, against brute force in
numpy.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.cache.pool import pool_dtype
from pallas_kernels.attention import AttentionMeta, KVLayer, attend, mosaic_tpu
from pallas_kernels.dispatch import dispatch
from pallas_kernels.float8 import loaded, stored

IMPLEMENTATIONS = ("reference", "xla", "pallas_triton_interpret")
NUM_PAGES = 40  # of one layer
NUM_LAYERS = 3
LAYER = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `rows` are (q_len, kv_len), decode rows first; the first `num_decode` of them are
    decode rows.
    """

    rows: tuple[tuple[int, int], ...]
    num_decode: int
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: float | None = None  # size of the heads' logits
    decode_only: bool = False
    spare_rows: int = 2
    spare_tokens: int = 3
    dtype: str = "float32"
    kv_dtype: str | None = None  # of the pool; None: dtype

    def as_stored(self, x: np.ndarray) -> np.ndarray:
        """What keys or values are once they went through the pool."""
        dtype = jnp.dtype(self.kv_dtype or self.dtype)
        return np.asarray(loaded(stored(jnp.array(x, self.dtype), dtype), jnp.float32))

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.rows)


DECODE = ((1, 1), (1, 37), (1, 64), (1, 130))
MIXED = ((1, 50), (1, 7), (5, 5), (19, 70), (1, 33))
CASES = {
    "decode": Case(DECODE, 4, decode_only=True),
    "decode of one row": Case(((1, 45),), 1, decode_only=True, spare_rows=0, spare_tokens=0),
    "decode with prompt tails": Case(DECODE, 2, decode_only=True, group=3, kv_heads=3),
    "decode with a window and a cap": Case(DECODE, 4, decode_only=True, window=20, soft_cap=5.0),
    "decode, pages of one token": Case(((1, 9), (1, 30)), 2, decode_only=True, page_size=1),
    "mixed": Case(MIXED, 2),
    "mixed, one query head": Case(MIXED, 2, group=1, kv_heads=1),
    "mixed, group 3": Case(MIXED, 2, group=3, kv_heads=3),
    "mixed, group 8, head_dim 128": Case(MIXED, 2, group=8, kv_heads=1, head_dim=128),
    "mixed, head_dim 96": Case(MIXED, 2, head_dim=96),
    "mixed, window": Case(MIXED, 2, window=9),
    "mixed, soft cap": Case(MIXED, 2, soft_cap=3.0),
    "mixed, pages of one token": Case(((1, 9), (6, 20), (3, 3)), 1, page_size=1),
    "chunks only, more rows than tokens": Case(((2, 40), (1, 20)), 0, spare_rows=9, spare_tokens=1),
    "a chunk of many tiles": Case(((1, 3), (70, 190)), 1, group=4, spare_tokens=0),
    "bfloat16": Case(MIXED, 2, dtype="bfloat16"),
    "decode, sinks": Case(DECODE, 4, decode_only=True, group=3, sinks=2.0),
    "decode of unsplit contexts, sinks": Case(
        ((1, 9), (1, 30)), 2, decode_only=True, page_size=1, window=7, sinks=2.0
    ),
    "mixed, sinks": Case(MIXED, 2, group=3, sinks=2.0),
    "mixed, sinks, window and cap": Case(MIXED, 2, head_dim=96, window=9, soft_cap=3.0, sinks=1.0),
    "mixed, sinks that outweigh every key": Case(MIXED, 2, sinks=300.0),
}
#: Variations on others, at full length only.
VARIATIONS = (
    *("decode of one row", "decode of unsplit contexts, sinks", "mixed, one query head"),
    *("mixed, group 3", "mixed, group 8, head_dim 128", "mixed, pages of one token"),
    *("mixed, soft cap", "mixed, sinks", "mixed, sinks that outweigh every key"),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pool_k: np.ndarray  # [L · pages, page, K, D], NaN wherever this call's rows hold nothing
    pool_v: np.ndarray
    meta: AttentionMeta
    sinks: np.ndarray | None


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Random values, page tables and cached prefixes; every slot that no row owns is NaN, trash
    page included.
    """
    rng = np.random.default_rng(seed)
    num_rows, num_tokens = len(case.rows) + case.spare_rows, case.num_tokens + case.spare_tokens
    num_pages = max(NUM_PAGES, 1 + sum(-(-kv // case.page_size) for _, kv in case.rows))
    q_lens = np.array([q for q, _ in case.rows] + [0] * case.spare_rows)
    kv_lens = np.array([kv for _, kv in case.rows] + [0] * case.spare_rows)
    width = -(-kv_lens.max() // case.page_size) + 1
    table = rng.integers(0, num_pages, (num_rows, width))  # stale ids beyond a row's pages
    free = rng.permutation(np.arange(1, num_pages))
    positions, token_rows = np.zeros(num_tokens, int), np.full(num_tokens, num_rows)
    slots = np.zeros(num_tokens, int)
    shape = (NUM_LAYERS * num_pages * case.page_size, case.kv_heads, case.head_dim)
    pool_k, pool_v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    token = 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        needed = -(-kv_len // case.page_size)
        table[row, :needed], free = free[:needed], free[needed:]
        flat = (
            table[row, np.arange(kv_len) // case.page_size] * case.page_size
            + np.arange(kv_len) % case.page_size
        )
        cached = flat[: kv_len - q_len] + LAYER * num_pages * case.page_size
        pool_k[cached] = rng.standard_normal((len(cached), case.kv_heads, case.head_dim))
        pool_v[cached] = rng.standard_normal((len(cached), case.kv_heads, case.head_dim))
        span = slice(token, token + q_len)
        positions[span] = np.arange(kv_len - q_len, kv_len)
        token_rows[span], slots[span] = row, flat[kv_len - q_len :]
        token += q_len
    ints = [np.concatenate([[0], np.cumsum(q_lens)]), kv_lens, table, positions, token_rows, slots]
    meta = AttentionMeta(
        *(jnp.asarray(x, jnp.int32) for x in ints),
        jnp.asarray([case.num_decode, len(case.rows)], jnp.int32),
        max_q_len=1 if case.decode_only else None,
    )
    heads = case.kv_heads * case.group

    def normal(heads: int) -> np.ndarray:
        return rng.standard_normal((num_tokens, heads, case.head_dim)).astype(np.float32)

    pools = (NUM_LAYERS * num_pages, case.page_size, case.kv_heads, case.head_dim)
    sinks = None if case.sinks is None else rng.standard_normal(heads).astype(np.float32)
    return Batch(
        normal(heads),
        normal(case.kv_heads),
        normal(case.kv_heads),
        pool_k.reshape(pools),
        pool_v.reshape(pools),
        meta,
        None if sinks is None else sinks * np.float32(case.sinks),
    )


def brute_force(case: Case, batch: Batch) -> np.ndarray:
    """[T, H, D] in float64: every query against every earlier token of its row, one at a time."""
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS
    table = np.asarray(batch.meta.page_table) + LAYER * num_pages
    out = np.zeros(batch.q.shape)
    token = 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        span = slice(token, token + q_len)
        pages = table[row, : -(-kv_len // case.page_size)]
        cached = kv_len - q_len
        k = np.concatenate(
            [batch.pool_k[pages].reshape(-1, *batch.k.shape[1:])[:cached], batch.k[span]]
        )
        v = np.concatenate(
            [batch.pool_v[pages].reshape(-1, *batch.v.shape[1:])[:cached], batch.v[span]]
        )
        for i in range(q_len):
            position = cached + i
            low = 0 if case.window is None else max(0, position - case.window + 1)
            seen = slice(low, position + 1)
            for head in range(batch.q.shape[1]):
                kv_head = head // case.group
                query = batch.q[token + i, head].astype(np.float64)
                scores = k[seen, kv_head] @ query * case.head_dim**-0.5
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                peak = scores.max()
                weights = np.exp(scores - peak)
                total = weights.sum()
                if batch.sinks is not None:
                    total += np.exp(batch.sinks[head] - peak)
                out[token + i, head] = weights @ v[seen, kv_head] / total
        token += q_len
    return out


def call(
    case: Case, batch: Batch, implementation: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output and pools of one jitted call that donates the pool."""
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS

    def step(q, k, v, pool_k, pool_v, first_page, meta, sinks):
        out, layer = attend(
            q,
            k,
            v,
            KVLayer(pool_k, pool_v, first_page),
            meta,
            scale=case.head_dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=sinks,
            implementation=implementation,
        )
        return out, layer.k, layer.v

    # A GPU's pool, for its kernels on CPU too.
    platform = "gpu" if "triton" in implementation else jax.default_backend()
    held = pool_dtype(case.kv_dtype or case.dtype, platform)
    arrays = (jnp.array(x, case.dtype) for x in (batch.q, batch.k, batch.v))
    pools = (stored(jnp.array(x, case.dtype), held) for x in (batch.pool_k, batch.pool_v))
    result = jax.jit(step, donate_argnums=(3, 4))(
        *arrays, *pools, jnp.int32(LAYER * num_pages), batch.meta, batch.sinks
    )
    out, pool_k, pool_v = (np.asarray(loaded(x, jnp.float32)) for x in result)
    return out, pool_k, pool_v


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in VARIATIONS else n for n in CASES]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_equals_brute_force(implementation: str, name: str) -> None:
    case = CASES[name]
    batch = make_batch(case)
    out, pool_k, pool_v = call(case, batch, implementation)
    expected = brute_force(case, batch)
    tolerance = 2e-5 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        out[: case.num_tokens], expected[: case.num_tokens], atol=tolerance, rtol=tolerance
    )
    assert np.all(out[case.num_tokens :] == 0.0), "padding tokens must be 0, not NaN"
    assert_written(case, batch, batch.k, batch.pool_k, pool_k)
    assert_written(case, batch, batch.v, batch.pool_v, pool_v)


def assert_written(
    case: Case, batch: Batch, values: np.ndarray, before: np.ndarray, after: np.ndarray
) -> None:
    """Each real token's values are at its slot, and nothing else changed but the layer's trash
    page.
    """
    num_pages = before.shape[0] // NUM_LAYERS
    shape = (-1, *values.shape[1:])
    expected, values = case.as_stored(before).reshape(shape).copy(), case.as_stored(values)
    base = LAYER * num_pages * case.page_size
    slots = base + np.asarray(batch.meta.write_slots)[: case.num_tokens]
    assert len(set(slots.tolist())) == case.num_tokens
    expected[slots] = values[: case.num_tokens]
    trash = slice(base, base + case.page_size)
    after = after.reshape(shape)
    if case.spare_tokens:
        assert np.isfinite(after[base]).all(), "padding tokens write to the trash page"
    keep = np.ones(len(after), bool)
    keep[trash] = False
    np.testing.assert_array_equal(after[keep], expected[keep])


FREED = {
    "decode": Case(DECODE, 4, decode_only=True, window=20),
    "decode, one page a window": Case(DECODE, 4, decode_only=True, window=16, soft_cap=5.0),
    "decode, pages of one token": Case(
        ((1, 9), (1, 30)), 2, decode_only=True, page_size=1, window=4
    ),
    "mixed": Case(MIXED, 2, window=9),
    "a chunk of many tiles": Case(((1, 3), (1, 180), (70, 190)), 2, group=4, window=33),
    "bfloat16": Case(MIXED, 2, dtype="bfloat16", window=9),
}


def without_freed_pages(case: Case, batch: Batch, junk: float) -> tuple[Batch, int]:
    """The batch with 0 for each row's pages that no query of the step sees, and `junk` in the
    trash page and in those pages; and how many there were.
    """
    assert case.window is not None
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS
    table = np.array(batch.meta.page_table)
    pool_k, pool_v = batch.pool_k.copy(), batch.pool_v.copy()
    gone = [LAYER * num_pages]
    for row, (q_len, kv_len) in enumerate(case.rows):
        first = max(0, kv_len - q_len + 1 - case.window) // case.page_size
        gone += (table[row, :first] + LAYER * num_pages).tolist()
        table[row, :first] = 0
    pool_k[gone] = pool_v[gone] = junk
    meta = dataclasses.replace(batch.meta, page_table=jnp.asarray(table, jnp.int32))
    return dataclasses.replace(batch, pool_k=pool_k, pool_v=pool_v, meta=meta), len(gone) - 1


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        pytest.param(name, junk, marks=() if everyday else pytest.mark.full)
        for name in FREED
        for junk in (3e4, -3e4, np.nan)
        for everyday in [np.isnan(junk) or (name, junk) == ("mixed", 3e4)]
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_freed_outside_the_window_are_never_seen(
    implementation: str, name: str, junk: float
) -> None:
    """Whatever the trash page holds, also NaN; and who reads a freed page meanwhile owns it."""
    case = FREED[name]
    batch = make_batch(case)
    expected = brute_force(case, batch)
    batch, num_freed = without_freed_pages(case, batch, junk)
    assert num_freed >= 3
    out, _, _ = call(case, batch, implementation)
    tolerance = 2e-5 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        out[: case.num_tokens], expected[: case.num_tokens], atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("name", FREED)
def test_the_tpu_kernel_is_shown_contexts_that_begin_at_the_window(name: str) -> None:
    """Its contexts are shorter; what a reference computes over them is the same."""
    case = FREED[name]
    batch = make_batch(case)
    expected = brute_force(case, batch)
    batch, _ = without_freed_pages(case, batch, np.nan)
    meta = batch.meta
    most = 1 if case.decode_only else case.num_tokens
    table, kv_lens = mosaic_tpu._from_window(meta, case.window or 0, case.page_size, most)
    assert table.shape[1] <= meta.page_table.shape[1]
    assert int(kv_lens.max()) < int(meta.kv_lens.max())
    shift = np.append(np.asarray(meta.kv_lens - kv_lens), 0)
    positions = np.asarray(meta.positions) - shift[np.asarray(meta.token_rows)]
    meta = dataclasses.replace(
        meta, page_table=table, kv_lens=kv_lens, positions=jnp.asarray(positions, jnp.int32)
    )
    out, _, _ = call(case, dataclasses.replace(batch, meta=meta), "reference")
    tolerance = 2e-5 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        out[: case.num_tokens], expected[: case.num_tokens], atol=tolerance, rtol=tolerance
    )


def test_sinks_take_weight_from_every_key() -> None:
    case = CASES["mixed, sinks"]
    batch = make_batch(case)
    assert batch.sinks is not None
    without = brute_force(case, dataclasses.replace(batch, sinks=None))
    shares = (brute_force(case, batch) / np.where(without == 0, np.inf, without))[: case.num_tokens]
    assert 0.0 < shares.min() < 0.5 < shares.max() < 1.0


#: Page size, KV heads, tokens.
EVERYDAY = [(16, 2, 8), (16, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize("decode_only", (True, False))
@pytest.mark.parametrize(
    ("page_size", "kv_heads", "tokens"),
    [
        pytest.param(*sizes, marks=() if sizes in EVERYDAY else pytest.mark.full)
        for sizes in itertools.product((16, 1), (2, 1), (1, 2, 8))
    ],
)
def test_a_donated_pool_is_never_copied(
    page_size: int, kv_heads: int, decode_only: bool, tokens: int
) -> None:
    """Layer after layer in place: no temporary of the pool's size, at one token too, through nested
    jits, with dimensions of 1 that XLA could lay out anew.
    """
    pool = jax.ShapeDtypeStruct((4 * 1000, page_size, kv_heads, 64), jnp.float32)
    meta = _meta_shapes(tokens, rows=tokens, pages=32, max_q_len=1 if decode_only else None)
    q = jax.ShapeDtypeStruct((tokens, 4, 64), jnp.float32)

    @jax.jit
    def layer(q, pool_k, pool_v, first_page, meta):
        # As in a model, a layer's keys come from the output of the layer before, so its write is
        # ordered after the reads.
        kv_layer = KVLayer(pool_k, pool_v, first_page)
        k, v = q[:, :kv_heads] + 1, q[:, kv_heads : 2 * kv_heads]
        return attend(q, k, v, kv_layer, meta, scale=0.1, implementation="xla")

    def step(q, pool_k, pool_v, meta):
        for index in range(3):
            q, kv = layer(q, pool_k, pool_v, jnp.int32(1000 * index), meta)
            pool_k, pool_v = kv.k, kv.v
        return q, pool_k, pool_v

    memory = (
        jax.jit(step, donate_argnums=(1, 2)).lower(q, pool, pool, meta).compile().memory_analysis()
    )
    size = 2 * 4000 * page_size * kv_heads * 64 * 4
    assert memory.alias_size_in_bytes >= size, f"{memory.alias_size_in_bytes=} {size=}"
    assert memory.temp_size_in_bytes < size / 8, f"{memory.temp_size_in_bytes=} {size=}"


def _meta_shapes(tokens: int, *, rows: int, pages: int, max_q_len: int | None) -> AttentionMeta:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return AttentionMeta(
        ints(rows + 1),
        ints(rows),
        ints(rows, pages),
        ints(tokens),
        ints(tokens),
        ints(tokens),
        ints(2),
        max_q_len=max_q_len,
    )


def test_the_fused_layout_holds_the_same_keys_and_values() -> None:
    case = CASES["mixed"]
    batch = make_batch(case)
    expected, _, _ = call(case, batch, "reference")
    num_pages = batch.pool_k.shape[0] // NUM_LAYERS
    fused = np.stack([batch.pool_k, batch.pool_v], axis=3).reshape(
        *batch.pool_k.shape[:2], -1, case.head_dim
    )
    fused = np.pad(fused, ((0, 0), (0, 0), (0, 0), (0, 128 - case.head_dim)))
    out, layer = attend(
        *(jnp.array(x) for x in (batch.q, batch.k, batch.v)),
        KVLayer(jnp.array(fused), None, jnp.int32(LAYER * num_pages)),
        batch.meta,
        scale=case.head_dim**-0.5,
        implementation="reference",
    )
    assert layer.v is None
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_named_implementation_that_cannot_serve_is_a_loud_error() -> None:
    case = CASES["mixed"]
    with pytest.raises(ValueError, match="unknown implementation 'cudnn'.*xla"):
        call(case, make_batch(case), "cudnn")
    with pytest.raises(NotImplementedError, match="fused"):
        call(case, make_batch(case), "mosaic_tpu")


def test_without_a_name_the_first_that_serves_is_taken() -> None:
    def refuse() -> str:
        raise NotImplementedError("too old")

    calls = {"a": refuse, "b": lambda: "b", "c": lambda: "c"}
    orders = {"cpu": ("a", "b", "c"), "gpu": ("a",), "tpu": ("c",)}
    assert dispatch(calls, orders, name=None, platform=None) == "b"
    assert dispatch(calls, orders, name=None, platform="tpu") == "c"
    assert dispatch(calls, orders, name="c", platform="gpu") == "c"
    with pytest.raises(NotImplementedError, match="a: too old"):
        dispatch(calls, orders, name=None, platform="gpu")
    with pytest.raises(ValueError, match="metal"):
        dispatch(calls, orders, name=None, platform="metal")
