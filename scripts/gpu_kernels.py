#!/usr/bin/env python3
"""Proves and measures the GPU attention kernels on the card that is there.

    scripts/gpu_kernels.py           the op's test cases, then times; one JSON object a line
    scripts/gpu_kernels.py --tune    also tries block sizes and prints the best of each shape
    scripts/gpu_kernels.py --part 0/4    every fourth case from the first on, and no times: parts
                                     may run side by side
    scripts/gpu_kernels.py --tiny    a dry run: few cases, small shapes, the interpreted kernel

Exits 1 when a case is wrong; what an implementation leaves to others is no case. float32 must agree
with brute force to 1e-5 of its norm (tf32 would give 3e-4), bfloat16 to 3e-3; over float8 pools
too, with the same rounded keys and values. Times are of the attention alone and of the op with its
KV write, chained through 8 layers' worth of calls in one program, so that launches overlap as they
do in a model; KV bytes are counted once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_attention_op as suite  # noqa: E402

from pallas_kernels import attention  # noqa: E402
from pallas_kernels.attention import AttentionMeta, KVLayer, attend, pallas_triton  # noqa: E402
from pallas_kernels.attention.tuning import block_sizes  # noqa: E402

LIMITS = {"float32": 1e-5, "bfloat16": 3e-3}  # of relative error
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SINKS: dict[str, Any] = {"head_dim": 64, "group": 8, "window": 128, "sinks": 3.0}
#: Rows longer than Hopper's tiles, with and without a cached prefix, among short ones.
ROWS = ((1, 50), (1, 7), (64, 64), (65, 200), (130, 130), (5, 40), (300, 333), (128, 700))
LONG = suite.Case(ROWS, 2, group=4, head_dim=128)
LONGER: dict[str, dict[str, Any]] = {
    "long rows": {},
    "long rows, head_dim 64": {"head_dim": 64},
    "long rows, window": {"window": 100},
    "long rows, small window and cap": {"window": 9, "soft_cap": 3.0},
    "long rows, one query head": {"group": 1, "kv_heads": 3},
    "long rows, sinks": {"sinks": 2.0},
    "long rows, head_dim 64, group 8, window and sinks": SINKS,
    "long rows, sinks that outweigh every key": {"sinks": 300.0},
    "long rows, pages of 8": {"page_size": 8},
    "long rows, pages of 64, all rows real": {"page_size": 64, "spare_rows": 0, "spare_tokens": 0},
}
#: So many decode rows that no context is split, some of one token and some of many blocks.
MANY = suite.Case(
    tuple((1, 1 + 37 * i % 333) for i in range(130)), 130,
    group=4, head_dim=128, decode_only=True, spare_tokens=2,
)  # fmt: skip
MANIER: dict[str, dict[str, Any]] = {
    "many rows": {},
    "many rows, head_dim 64, group 16": {"head_dim": 64, "group": 16},
    "many rows, window": {"window": 100},
    "many rows, small window and cap": {"window": 9, "soft_cap": 3.0},
    "many rows, one query head": {"group": 1, "kv_heads": 3},
    "many rows, head_dim 64, group 8, window and sinks": SINKS,
    "many rows, pages of 8": {"page_size": 8},
    "many rows, pages of 64, all real": {"page_size": 64, "spare_rows": 0, "spare_tokens": 0},
}
#: Over float8 pools: both ways to decode, ragged and long rows, a width that is no power of two.
NARROW: dict[str, suite.Case] = {
    "float8, decode in splits": suite.CASES["decode"],
    "float8, decode with a window and a cap": suite.CASES["decode with a window and a cap"],
    "float8, many rows": MANY,
    "float8, mixed, head_dim 96": suite.CASES["mixed, head_dim 96"],
    "float8, long rows": LONG,
    "float8, long rows, window": dataclasses.replace(LONG, window=100),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """`rows` rows of `context` tokens, all of them new (prefill) or one of them (decode)."""

    rows: int
    context: int
    prefill: bool = False
    layers: int = 8
    chain: int = 8  # calls of one program
    calls: int = 10  # programs dispatched back to back

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.context}"

    @property
    def kind(self) -> str:
        return "prefill" if self.prefill else "decode"

    @property
    def num_tokens(self) -> int:
        return self.rows * self.context if self.prefill else self.rows


# Enough layers that their KV exceeds a 60 MB L2.
SHAPES = (
    Shape(1, 1024, layers=32),
    Shape(1, 32768),
    Shape(64, 1024),
    Shape(256, 1024, layers=4),
    Shape(64, 8192, layers=2),
    Shape(8, 1024, prefill=True),
)


def every_case() -> dict[str, suite.Case]:
    """The op's test suite, and what only a card is quick enough for."""
    cases = dict(suite.CASES)
    cases["mixed, head_dim 80"] = suite.Case(suite.MIXED, 2, head_dim=80)
    cases["mixed, head_dim 256"] = suite.Case(suite.MIXED, 2, head_dim=256)
    cases["mixed, group 16"] = suite.Case(suite.MIXED, 2, group=16, kv_heads=1)
    cases |= {name: dataclasses.replace(LONG, **change) for name, change in LONGER.items()}
    cases |= {name: dataclasses.replace(MANY, **change) for name, change in MANIER.items()}
    for kv_dtype in ("float8_e4m3fn", "float8_e5m2"):
        for name, case in NARROW.items():
            cases[f"{name}, {kv_dtype}"] = dataclasses.replace(case, kv_dtype=kv_dtype)
    return cases


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What is proven and timed."""

    cases: dict[str, suite.Case] = dataclasses.field(default_factory=every_case)
    shapes: tuple[Shape, ...] = SHAPES
    far_pages: int = 140_000  # · 16 · 8 · 128 = 2.3e9 elements
    interpret: bool = False  # the Pallas kernel on CPU instead of what was asked for


_ONCE: dict[str, Any] = {"layers": 2, "chain": 1, "calls": 1}
DRY = Run(
    cases={"float8": suite.Case(((1, 9),), 1, decode_only=True, kv_dtype="float8_e5m2")},
    shapes=(Shape(2, 40, **_ONCE), Shape(2, 24, prefill=True, **_ONCE)),
    far_pages=40,
    interpret=True,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--implementations", nargs="+", default=["mosaic_gpu", "pallas_triton", "jax_triton"]
    )
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--part", default="")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.implementations) - set(attention.IMPLEMENTATIONS):
        parser.error(f"unknown {sorted(unknown)}; known: {', '.join(attention.IMPLEMENTATIONS)}")
    run = DRY if options.tiny else Run()
    implementations = ["pallas_triton_interpret"] if run.interpret else options.implementations
    first, _, step = options.part.partition("/")
    part = slice(int(first or 0), None, int(step or 1))
    report(device=jax.devices()[0].device_kind, jax=jax.__version__)
    failures = sum(check(implementation, run.cases, part) for implementation in implementations)
    if part.start == 0:
        failures += check_large_offsets(implementations, run.far_pages)
    shapes = () if options.part else run.shapes
    for shape in shapes:
        for implementation in implementations:
            report(**measure(shape, implementation))
    for shape in shapes if options.tune else ():
        tune(shape, run.interpret)
    report(failures=failures)
    return 1 if failures else 0


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def check(implementation: str, cases: dict[str, suite.Case], part: slice) -> int:
    """Number of wrong ones among `part` of the cases, in float32 and bfloat16."""
    jobs = [(name, case, dtype) for name, case in cases.items() for dtype in LIMITS][part]
    # Compiling takes nearly all the time; Triton's own compiler is not known to be thread-safe.
    workers = 1 if implementation == "jax_triton" else 8
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        errors = list(pool.map(lambda job: case_error(*job, implementation=implementation), jobs))
    done = [(d, e) for (_, _, d), e in zip(jobs, errors, strict=True) if e is not None]
    worst = {
        dtype: max((error for of, error in done if of == dtype), default=None) for dtype in LIMITS
    }
    wrong = sum(not error < LIMITS[dtype] for dtype, error in done)
    report(implementation=implementation, cases=len(done), wrong=wrong, worst_error=worst)
    return wrong


def case_error(name: str, case: suite.Case, dtype: str, implementation: str) -> float | None:
    """Relative error of one case; infinite when it fails or padding is not 0, None when it is left
    to another implementation. Reports what is wrong.
    """
    case = dataclasses.replace(case, dtype=dtype)
    batch = _rounded(suite.make_batch(case, seed=len(name)), case)
    found: dict[str, Any] = {"case": name, "implementation": implementation, "dtype": dtype}
    try:
        out, _, _ = suite.call(case, batch, implementation)
    except NotImplementedError:
        return None
    except Exception as error:  # every case is tried, and its error reported
        report(**found, error=str(error)[:500])
        return float("inf")
    error = relative_error(out, suite.brute_force(case, batch))
    if np.any(out[case.num_tokens :]):
        error = float("inf")
    if not error < LIMITS[dtype]:
        report(**found, relative_error=error)
    return error


def _rounded(batch: suite.Batch, case: suite.Case) -> suite.Batch:
    """The batch with values that both types hold exactly: only the kernel's own error is left."""
    q = np.asarray(jnp.asarray(batch.q, case.dtype).astype(jnp.float32))
    names = ("k", "v", "pool_k", "pool_v")
    held = {name: case.as_stored(getattr(batch, name)) for name in names}
    return dataclasses.replace(batch, q=q, **held)


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def check_large_offsets(implementations: list[str], pages: int) -> int:
    """A pool of so many pages, for more than 2^31 elements, read at its far end."""
    shape = Shape(4, 100)
    q, pool, meta = inputs(shape, pages=pages)
    table = meta.page_table
    meta = dataclasses.replace(meta, page_table=pages - 1 - table)
    layer = KVLayer(pool, pool, jnp.int32(0))
    run = jax.jit(
        lambda q, layer, meta, call: call(q, layer, meta, scale=0.1), static_argnames="call"
    )
    oracle = attention.IMPLEMENTATIONS["reference"]
    expected = np.asarray(run(q.astype(jnp.float32), layer, meta, oracle))
    case, wrong = f"pool of {pool.size / 1e9:.1f}e9 elements", 0
    for name in implementations:
        try:
            out = run(q, layer, meta, attention.IMPLEMENTATIONS[name])
        except NotImplementedError as reason:
            report(case=case, implementation=name, left=str(reason))
            continue
        error = relative_error(np.asarray(out.astype(jnp.float32)), expected)
        wrong += not error < LIMITS["bfloat16"]
        report(case=case, implementation=name, relative_error=error)
    return wrong


def inputs(shape: Shape, pages: int | None = None) -> tuple[jax.Array, jax.Array, AttentionMeta]:
    """Random queries, pool (of K and of V) and page table."""
    rng = np.random.default_rng(0)
    per_row = -(-shape.context // PAGE)
    total = pages or 1 + shape.rows * per_row
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (shape.num_tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    layers = 1 if pages else shape.layers
    pool = jax.random.normal(keys[1], (layers * total, PAGE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    table = rng.permutation(np.arange(1, 1 + shape.rows * per_row)).reshape(shape.rows, per_row)
    q_len = shape.context if shape.prefill else 1
    rows = np.repeat(np.arange(shape.rows), q_len)
    positions = np.tile(np.arange(shape.context - q_len, shape.context), shape.rows)
    slots = table[rows, positions // PAGE] * PAGE + positions % PAGE
    kv_lens = np.full(shape.rows, shape.context)
    cu_q_lens = np.arange(shape.rows + 1) * q_len
    distribution = [0 if shape.prefill else shape.rows, shape.rows]
    arrays = (cu_q_lens, kv_lens, table, positions, rows, slots, distribution)
    meta = AttentionMeta(
        *[jnp.asarray(x, jnp.int32) for x in arrays], max_q_len=None if shape.prefill else 1
    )
    return q, pool, meta


def measure(shape: Shape, implementation: str) -> dict[str, Any]:
    """Microseconds of one call, and what of the card's bandwidth or arithmetic that is."""
    q, pool, meta = inputs(shape)
    result: dict[str, Any] = {"shape": shape.name, "implementation": implementation}
    try:
        seconds = time_kernel(attention.IMPLEMENTATIONS[implementation], shape, q, pool, meta)
    except NotImplementedError as reason:
        return result | {"left": str(reason)}
    result["us"] = round(seconds * 1e6, 1)
    result["op_us"] = round(time_op(implementation, shape, q, pool, meta) * 1e6, 1)
    if shape.prefill:
        pairs = shape.rows * shape.context * (shape.context + 1) / 2
        result["tflops"] = round(4 * HEADS * HEAD_DIM * pairs / seconds / 1e12, 1)
    else:
        kv_bytes = 2 * 2 * shape.rows * shape.context * KV_HEADS * HEAD_DIM
        result["tb_per_s"] = round(kv_bytes / seconds / 1e12, 3)
    return result


def time_kernel(
    call: Callable[..., jax.Array], shape: Shape, q: jax.Array, pool: jax.Array, meta: AttentionMeta
) -> float:
    """Seconds of one attention, `shape.chain` of them in a program."""
    num_pages = pool.shape[0] // shape.layers

    @jax.jit
    def layer(
        q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, meta: AttentionMeta
    ) -> jax.Array:
        return call(q, KVLayer(k, v, first), meta, scale=HEAD_DIM**-0.5)

    def chain(q: jax.Array, k: jax.Array, v: jax.Array, meta: AttentionMeta) -> jax.Array:
        for i in range(shape.chain):
            q = layer(q, k, v, jnp.int32(i % shape.layers * num_pages), meta)
        return q

    return best_time(jax.jit(chain), shape.calls, q, pool, pool[::-1], meta) / shape.chain


def time_op(
    implementation: str, shape: Shape, q: jax.Array, pool: jax.Array, meta: AttentionMeta
) -> float:
    """Seconds of one attend, KV write included, in a program that donates the pool."""
    num_pages = pool.shape[0] // shape.layers

    def chain(q: jax.Array, k: jax.Array, v: jax.Array, meta: AttentionMeta) -> Any:
        for i in range(shape.chain):
            new, first = q[:, :KV_HEADS], jnp.int32(i % shape.layers * num_pages)
            q, kv_layer = attend(
                q, new, new, KVLayer(k, v, first), meta,
                scale=HEAD_DIM**-0.5, implementation=implementation,
            )  # fmt: skip
            assert kv_layer.v is not None
            k, v = kv_layer.k, kv_layer.v
        return q, k, v

    step = jax.jit(chain, donate_argnums=(1, 2))
    k, v, best = jnp.array(pool), jnp.array(pool), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(shape.calls):
            _, k, v = step(q, k, v, meta)
        jax.block_until_ready((k, v))
        best = min(best, (time.perf_counter() - begin) / shape.calls)
    return best / shape.chain


def best_time(run: Callable[..., jax.Array], calls: int, *args: Any) -> float:
    """Seconds of one call, `calls` of them back to back, best of 5."""
    jax.block_until_ready(run(*args))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def tune(shape: Shape, interpret: bool) -> None:
    """Print the candidates for this shape, fastest first (at most 6)."""
    if shape.prefill:
        names = ("queries", "block", "warps", "stages")
        grid = [(128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 2), (64, 128, 4, 2)]
        grid += [(128, 128, 4, 2), (128, 64, 8, 2), (256, 64, 8, 2), (128, 32, 4, 4)]
    else:
        names = ("splits", "block", "warps", "stages")
        splits = {1: (16, 32, 64), 64: (1, 2, 4), 256: (1, 2)}.get(shape.rows, (2,))
        grid = [(s, *b) for s in splits for b in ((64, 4, 3), (64, 2, 4), (128, 4, 2))]
    q, pool, meta = inputs(shape)
    found = []
    for candidate in grid:
        entry = dict(zip(names, candidate, strict=True))
        call = functools.partial(
            pallas_triton.attention,
            interpret=interpret,
            sizes=lambda kernel, entry=entry, **facts: (
                entry if kernel.endswith(shape.kind) else block_sizes(kernel, **facts)
            ),
        )
        try:
            found.append((time_kernel(call, shape, q, pool, meta), entry))
        except Exception as error:  # sizes that do not fit the card are no failure
            report(tune=shape.name, **entry, error=str(error)[:200])
    for seconds, entry in sorted(found, key=lambda item: item[0])[:6]:
        report(tune=shape.name, us=round(seconds * 1e6, 1), **entry)


if __name__ == "__main__":
    sys.exit(main())
