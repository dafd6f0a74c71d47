#!/usr/bin/env python3
"""Proves and measures attention over a latent pool on the card that is there.

    scripts/gpu_latent.py            correctness, then times; one JSON object a line
    scripts/gpu_latent.py --sweep    also tries other block sizes, the best of each shape named last
    scripts/gpu_latent.py --tiny     a dry run: the interpreted kernel at small shapes, on CPU too
    --implementations NAME …         what is proven and timed; a sweep is of pallas_triton
    --only PART                      times shapes with PART in their name

A latent is DeepSeek's, 512 numbers and 64 rotated ones; 16 query heads are V2-Lite's, 128 V3's.
bfloat16 results must agree with float32's to 1e-2 of their norm, NaN in what no row owns may not
show, and a donated pool must stay where it is. Exits 1 when one does not.

Times are of 8 calls in one program, each over another part of the pool and with random pages. The
floor is the larger of latents read / 4.3 TB/s and arithmetic / 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Read when the backend starts: a graph could run calls side by side that do not need each other.
_FLAGS = "--xla_gpu_enable_command_buffer="
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_kernels.attention import (  # noqa: E402
    AttentionMeta,
    KVLayer,
    attend,
    mosaic_gpu_latent,
    pallas_triton_latent,
)
from pallas_kernels.attention.tuning import block_sizes  # noqa: E402

BANDWIDTH, ARITHMETIC = 4.3e12, 800e12  # bytes and operations a second
ROUNDS, DISPATCHES = 5, 4  # best of ROUNDS, each that many programs back to back
LIMIT = 1e-2  # of relative error
PAGE = 16


class Shape(NamedTuple):
    """`rows` are (new tokens, context), decode rows first."""

    heads: int
    rows: tuple[tuple[int, int], ...]
    value_dim: int = 512
    rope_dim: int = 64
    padding: int = 0  # tokens

    @property
    def decode(self) -> bool:
        return all(new == 1 for new, _ in self.rows)

    @property
    def name(self) -> str:
        kind = "decode" if self.decode else "prefill"
        return f"{kind} {self.heads} heads {len(self.rows)} x {self.rows[0]}"

    def floor(self) -> float:
        """Seconds."""
        width = self.value_dim + self.rope_dim
        read = sum(context for _, context in self.rows) * width * 2
        pairs = sum(new * (context - (new - 1) / 2) for new, context in self.rows)
        work = 2 * pairs * self.heads * (width + self.value_dim)
        return max(read / BANDWIDTH, work / ARITHMETIC)


TIMED = (
    *(
        Shape(heads, ((1, context),) * batch)
        for heads in (16, 128)
        for batch, context in ((1, 8192), (64, 1024), (64, 8192))
    ),
    Shape(16, ((2048, 2048),) * 2),
    Shape(16, ((1024, 1024),) * 8),
    Shape(128, ((2048, 2048),)),
    Shape(128, ((512, 8192),)),
)
PROVEN = tuple(
    Shape(heads, rows, padding=padding)
    for heads in (8, 16, 64, 128)
    for rows, padding in (
        (((1, 700), (1, 33)), 0),
        (((1, 60), (1, 300), (5, 5), (150, 900), (1, 77)), 0),
        (((1, 60), (1, 300), (3, 40), (5, 5), (150, 900), (1, 77), (403, 403)), 13),
    )
)
#: What is timed of each implementation.
CALLS = {
    "pallas_triton": pallas_triton_latent.attention,
    "mosaic_gpu": mosaic_gpu_latent.attention,
    "pallas_triton_interpret": functools.partial(pallas_triton_latent.attention, interpret=True),
}
#: Tried by --sweep: heads, block, warps, stages; then splits or stacked queries.
BLOCKS = ((16, 32, 4, 3), (16, 64, 8, 3), (32, 32, 8, 3), (16, 64, 4, 3), (16, 32, 4, 2))
SPLITS, QUERIES = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What is proven and timed, and how large a pool is meanwhile."""

    proven: tuple[Shape, ...] = PROVEN
    timed: tuple[Shape, ...] = TIMED
    pool_layers: int = 100  # the pool is most of what is there while a shape is proven
    layers: int = 8  # calls of a program that is timed
    interpret: bool = False  # the kernel on CPU, where a donated pool is copied


DRY = Run(
    proven=(Shape(4, ((1, 20), (1, 3), (5, 9)), 32, 16, padding=2),),
    timed=(Shape(4, ((1, 20),) * 2, 32, 16), Shape(4, ((5, 9),), 32, 16)),
    pool_layers=2,
    layers=2,
    interpret=True,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    both = ["pallas_triton", "mosaic_gpu"]
    parser.add_argument("--implementations", nargs="+", choices=CALLS, default=both)
    parser.add_argument("--only", default="", metavar="PART")
    options = parser.parse_args()
    run = DRY if options.tiny else Run()
    names = ["pallas_triton_interpret"] if options.tiny else options.implementations
    report(device=jax.devices()[0].device_kind, jax=jax.__version__)
    wrong = [what for name in names for shape in run.proven for what in prove(shape, name, run)]
    timed = [shape for shape in run.timed if options.only in shape.name]
    times: dict[str, Any] = {}
    for name in names:
        call = functools.partial(CALLS[name], scale=0.1)
        times[name] = {shape.name: measure(shape, call, run.layers) for shape in timed}
    call = functools.partial(pallas_triton_latent.attention, scale=0.1)
    swept = timed if options.sweep else ()
    best = {shape.name: sweep(shape, call, run.layers) for shape in swept}
    report(wrong=wrong, us_and_ratio=times, **({"best": best} if best else {}))
    return 1 if wrong else 0


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def inputs(shape: Shape, layers: int) -> tuple[jax.Array, jax.Array, jax.Array, AttentionMeta]:
    """Queries, new latents, a pool of `layers` layers, NaN but for what rows own, and the batch: of
    random pages.
    """
    rng, rows = np.random.default_rng(0), len(shape.rows)
    needed = [-(-context // PAGE) for _, context in shape.rows]
    num_pages, width = 1 + sum(needed), max(needed)
    free = rng.permutation(np.arange(1, num_pages))
    owned = np.zeros((num_pages, PAGE), bool)
    table, positions, token_rows, slots = np.zeros((rows, width), np.int32), [], [], []
    for row, (new, context) in enumerate(shape.rows):
        table[row, : needed[row]], free = free[: needed[row]], free[needed[row] :]
        every, at = np.arange(context), np.arange(context - new, context)
        owned[table[row, every // PAGE], every % PAGE] = True
        positions.append(at)
        token_rows.append(np.full(new, row))
        slots.append(table[row, at // PAGE] * PAGE + at % PAGE)
    for values, what in ((positions, 0), (token_rows, rows), (slots, 0)):
        values.append(np.full(shape.padding, what))
    starts = np.concatenate([[0], np.cumsum([new for new, _ in shape.rows])])
    per_token = (np.concatenate(x) for x in (positions, token_rows, slots))
    lengths = [context for _, context in shape.rows]
    ones = sum(1 for _ in itertools.takewhile(lambda row: row[0] == 1, shape.rows))
    ints = (starts, lengths, table, *per_token, [ones, rows])
    most = 1 if shape.decode else None
    meta = AttentionMeta(*(jnp.asarray(x, jnp.int32) for x in ints), max_q_len=most)
    keys = jax.random.split(jax.random.key(0), 3)
    dim, tokens = shape.value_dim + shape.rope_dim, int(starts[-1]) + shape.padding
    sizes = ((tokens, shape.heads, dim), (tokens, 1, dim), (layers * num_pages, PAGE, 1, dim))
    q, k, pool = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)
    )
    pool = jnp.where(jnp.tile(owned, (layers, 1))[..., None, None], pool, jnp.bfloat16(jnp.nan))
    return q, k, pool, meta


def prove(shape: Shape, name: str, run: Run) -> Iterator[str]:
    """What is wrong with the kernel at this shape."""
    q, k, pool, meta = inputs(shape, run.pool_layers)
    first = jnp.int32(pool.shape[0] // 2)

    def step(implementation: str, q: Any, k: Any, pool: Any) -> tuple[jax.Array, jax.Array]:
        layer = KVLayer(pool, None, first, shape.value_dim)
        out, layer = attend(q, k, None, layer, meta, scale=0.05, implementation=implementation)
        return out, layer.k

    wide = (x.astype(jnp.float32) for x in (q, k, pool))
    expected, _ = jax.jit(functools.partial(step, "reference"))(*wide)
    program = jax.jit(functools.partial(step, name), donate_argnums=2)
    memory: Any = program.lower(q, k, pool).compile().memory_analysis()
    copied = not run.interpret and memory.temp_size_in_bytes > pool.nbytes // 2
    out, _ = program(q, k, pool)
    error = float(jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    temporaries = memory.temp_size_in_bytes
    report(of=name, shape=shape.name, error=round(error, 5), temporaries=temporaries)
    if not error < LIMIT:
        yield f"{name} {shape.name}: error {error}"
    if copied:
        yield f"{name} {shape.name}: the pool is copied"


def measure(shape: Shape, call: Any, num_layers: int) -> tuple[float, float]:
    """Microseconds a call, and how many times the floor that is."""
    q, _, pool, meta = inputs(shape, num_layers)
    pages = pool.shape[0] // num_layers

    @jax.jit
    def layers(q: jax.Array, pool: jax.Array) -> jax.Array:
        for layer in range(num_layers):
            view = KVLayer(pool, None, jnp.int32(layer * pages), shape.value_dim)
            out = call(q, view, meta)
            q = q.at[0, 0, 0].add(out[0, 0, 0])  # the next one waits
        return q

    jax.block_until_ready(layers(q, pool))
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready([layers(q, pool) for _ in range(DISPATCHES)])
        best = min(best, (time.perf_counter() - begin) / DISPATCHES / num_layers)
    found = round(best * 1e6, 1), round(best / shape.floor(), 2)
    report(shape=shape.name, us=found[0], times_the_floor=found[1])
    return found


def sweep(shape: Shape, call: Any, num_layers: int) -> dict[str, Any]:
    """The fastest block sizes."""
    results = []
    last, options = ("splits", SPLITS) if shape.decode else ("queries", QUERIES)
    for blocks, number in itertools.product(BLOCKS, options):
        names = ("heads", "block", "warps", "stages", last)
        tuned: dict[str, int] = dict(zip(names, (*blocks, number), strict=True))
        try:
            tried = functools.partial(call, sizes=_only(tuned, shape.decode))
            took, ratio = measure(shape, tried, num_layers)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # too large for a processor
            report(shape=shape.name, **tuned, failed=str(error)[:100])
            continue
        results.append((took, ratio, tuned))
    took, ratio, tuned = min(results, key=lambda result: result[0])
    return {"us": took, "times_the_floor": ratio, **tuned}


def _only(tuned: dict[str, int], decode: bool) -> Any:
    def sizes(kernel: str, **limits: int) -> dict[str, int]:
        return tuned if kernel.endswith("decode") == decode else block_sizes(kernel, **limits)

    return sizes


if __name__ == "__main__":
    sys.exit(main())
