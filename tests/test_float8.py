"""Keys and values stored as float8: the op over such pools, what is written, what it takes, and
what an engine answers with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_op import (
    CASES,
    IMPLEMENTATIONS,
    LAYER,
    NUM_LAYERS,
    Case,
    assert_written,
    brute_force,
    call,
    make_batch,
)
from tiny_models import NUM_PAGES, Served, empty_pool, oracle, random_tables
from tiny_models import PAGE as TINY_PAGE

from jserve.cache.pool import pool_dtype, pool_spec
from jserve.engine.engine import Engine
from jserve.runner.memory import DeviceMemory, local_bytes
from jserve.types import KVShape
from pallas_kernels.attention import KVLayer, attend
from pallas_kernels.float8 import loaded, stored
from pallas_kernels.kv_write import write_pages
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8 = {
    **{
        name: dataclasses.replace(CASES[name], kv_dtype=E4M3)
        for name in (
            "decode",
            "decode with a window and a cap",
            "mixed",
            "mixed, head_dim 96",
        )
    },
    "decode, e5m2": dataclasses.replace(CASES["decode"], kv_dtype=E5M2),
    "mixed, e5m2, window": dataclasses.replace(CASES["mixed, window"], kv_dtype=E5M2),
    "bfloat16": dataclasses.replace(CASES["bfloat16"], kv_dtype=E4M3),
}


EVERYDAY = ("decode", "mixed", "mixed, e5m2, window")


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in FLOAT8]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_equals_brute_force_over_the_rounded_keys_and_values(
    implementation: str, name: str
) -> None:
    case = FLOAT8[name]
    batch = make_batch(case)
    names = ("k", "v", "pool_k", "pool_v")
    held = {name: case.as_stored(getattr(batch, name)) for name in names}
    out, pool_k, pool_v = call(case, batch, implementation)
    if case.dtype == "bfloat16":
        held["q"] = np.asarray(jnp.asarray(batch.q, jnp.bfloat16).astype(jnp.float32))
    expected = brute_force(case, dataclasses.replace(batch, **held))
    assert np.abs(expected - brute_force(case, batch)).max() > 1e-2, "nothing was rounded"
    tolerance = 2e-5 if case.dtype == "float32" else 1e-2
    tokens = slice(case.num_tokens)
    np.testing.assert_allclose(out[tokens], expected[tokens], atol=tolerance, rtol=tolerance)
    assert np.all(out[case.num_tokens :] == 0.0)
    assert_written(case, batch, batch.k, batch.pool_k, pool_k)
    assert_written(case, batch, batch.v, batch.pool_v, pool_v)


@pytest.mark.parametrize("platform", ("cpu", "gpu"))
@pytest.mark.parametrize("source", ("float32", "bfloat16"))
@pytest.mark.parametrize(("dtype", "most"), ((E4M3, 448.0), (E5M2, 57344.0)))
def test_what_is_too_large_is_stored_as_the_largest_and_nan_as_nan(
    dtype: str, most: float, source: str, platform: str
) -> None:
    inf = np.inf
    x = np.array([0.0, 1.0, -1.06, most, most * 1.02, -most * 3, 1e30, -1e30, inf, -inf, np.nan])
    pool = jnp.zeros((2, 16, 1, 1), pool_dtype(dtype, platform))
    assert pool.dtype.itemsize == 1
    values = jnp.asarray(x, source).reshape(-1, 1, 1)
    written = jax.jit(write_pages)(pool, values, 16 + jnp.arange(len(x)))
    found = np.asarray(loaded(written, jnp.float32)).reshape(2, 16)
    expected = [0.0, 1.0, -1.0, most, most, -most, most, -most, most, -most, np.nan]
    np.testing.assert_array_equal(found[1, : len(x)], expected)
    assert not found[0].any() and not found[1, len(x) :].any()


@pytest.mark.parametrize("dtype", (E4M3, E5M2))
def test_every_float8_comes_out_of_a_pool_as_it_is(dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    every = every[np.isfinite(every.astype(np.float32))]
    for platform in ("cpu", "gpu"):
        held = stored(jnp.asarray(every.astype(np.float32)), pool_dtype(dtype, platform))
        for wide in (jnp.bfloat16, jnp.float32):
            found = np.asarray(loaded(held, wide).astype(jnp.float32))
            np.testing.assert_array_equal(found, every.astype(np.float32))


@pytest.mark.parametrize("decode_only", (pytest.param(True, marks=pytest.mark.full), False))
def test_a_donated_pool_is_never_converted(decode_only: bool) -> None:
    """XLA for CPUs would convert a float8 array as a whole to write a row of it."""
    case = Case(((1, 45),), 1, decode_only=decode_only, kv_dtype=E4M3)
    meta = make_batch(case).meta
    pages = NUM_LAYERS * 4000
    pool = jax.ShapeDtypeStruct((pages, 16, 2, 64), pool_dtype(E4M3, "cpu"))
    q = jax.ShapeDtypeStruct((case.num_tokens + 3, 4, 64), jnp.float32)

    @jax.jit
    def layer(q, k, v, first_page, meta):
        kv_layer = KVLayer(k, v, first_page)
        return attend(q, q[:, :2], q[:, 2:], kv_layer, meta, scale=0.1, implementation="xla")

    def step(q, k, v, meta):
        for index in range(2):
            q, kv = layer(q, k, v, jnp.int32(LAYER * index), meta)
            k, v = kv.k, kv.v
        return q, k, v

    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(q, pool, pool, meta).compile()
    memory, size = compiled.memory_analysis(), 2 * pages * 16 * 2 * 64
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8, f"{memory.temp_size_in_bytes=} {size=}"


def test_keys_and_values_of_different_types_are_no_layer() -> None:
    case = CASES["decode of one row"]
    k = jnp.zeros((4, 16, 2, 64), jnp.int8)
    with pytest.raises(AssertionError):
        layer = KVLayer(k, k.astype(jnp.uint8), jnp.int32(0))
        attend(jnp.zeros((1, 4, 64)), None, None, layer, make_batch(case).meta, scale=1.0)


def test_the_same_memory_holds_twice_the_tokens() -> None:
    rules = Rules(make_mesh(jax.devices()[:1]), TP)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=64)
    sizes = {}
    for dtype in ("bfloat16", E4M3, E5M2):
        sizes[dtype] = local_bytes(jax.tree.leaves(pool_spec(shape, 1, 16, dtype, rules)))
    assert sizes["bfloat16"] == 2 * sizes[E4M3] == 2 * sizes[E5M2] == 3 * 16 * 2 * 2 * 64 * 2
    limit = 1 << 30
    pages = {d: DeviceMemory(limit, 0, 0, size).num_pages(0.5) for d, size in sizes.items()}
    assert pages[E4M3] == pages[E5M2] == 2 * pages["bfloat16"]


FLAGS = {
    "load_format": "dummy",
    "tokenizer_path": "smollm2-135m",
    "random_seed": 0,
    "max_running_requests": 1,
    "chunked_prefill_size": 32,
    "context_length": 256,
    "log_level": "error",
    "compilation_cache_dir": "off",
}
PROMPT = [int(i) for i in np.random.default_rng(0).integers(100, 40000, 90)]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = json.loads(
        Path(__file__).parents[1].joinpath("configs", "smollm2-135m.json").read_text()
    )
    path = tmp_path_factory.mktemp("float8") / "two-layers.json"
    path.write_text(json.dumps({**shape, "num_hidden_layers": 2, "tie_word_embeddings": False}))
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model_path=str(model), kv_cache_dtype="fp8_e4m3", inline=True, **FLAGS) as engine:
        yield engine


def test_greedy_answers_are_the_same_with_and_without_cache_hits(engine: Engine) -> None:
    """What a request reads was rounded, whether it computed it or found it."""
    engine.flush_cache()
    prompts = {"whole": PROMPT, "branch": [*PROMPT[:50], *PROMPT[:20]]}
    runs = []
    for hits in (False, True):
        for name, prompt in prompts.items():
            if not hits:
                engine.flush_cache()
            body = engine.generate(input_ids=prompt, sampling_params=GREEDY)
            cached = body["meta_info"]["cached_tokens"]
            assert (cached >= 48) is hits, f"{name}: {cached=}"
            runs.append(body["output_ids"])
    assert runs[:2] == runs[2:]
    assert len(set(runs[0])) > 3, "an answer of one token shows nothing"


def test_server_info_tells_the_type_of_the_pool(engine: Engine) -> None:
    info = engine.get_server_info()
    assert (info["kv_cache_dtype"], info["kv_dtype"]) == ("fp8_e4m3", E4M3)
    assert info["dtype"] != E4M3


@pytest.mark.parametrize(
    ("dtype", "mean", "most"),
    ((E4M3, 0.03, 0.12), pytest.param(E5M2, 0.04, 0.15, marks=pytest.mark.full)),
)
def test_log_probabilities_are_near_those_over_a_float32_pool(
    dtype: str, mean: float, most: float
) -> None:
    """Of a teacher-forced text in chunks, with random weights; they have a deviation of 0.8."""
    ids = [int(i) for i in np.random.default_rng(1).integers(2, 96, 60)]
    chunks = [(0, ids[:25]), (25, ids[25:40]), (40, ids[40:])]
    tables = random_tables(1)
    served = Served.of(oracle("LlamaConfig"))
    found = []
    for kind in ("float32", dtype):
        pool = empty_pool(served.model, NUM_PAGES, TINY_PAGE, kind, served.rules)
        served = dataclasses.replace(served, kv=pool)
        served.program = jax.jit(served._program, donate_argnums=1)
        steps = [served.step([chunk], tables, bucket=(25, 1)) for chunk in chunks]
        logits = jax.nn.log_softmax(jnp.asarray(np.concatenate(steps)), axis=-1)
        found.append(np.asarray(logits)[np.arange(59), ids[1:]])
    error = np.abs(found[1] - found[0])
    assert 0.01 < error.mean() < mean and error.max() < most, f"{error.mean()=} {error.max()=}"
