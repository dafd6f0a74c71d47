#!/usr/bin/env python3
"""Proves and measures the grouped matmul on the card that is there.

    scripts/gpu_gmm.py               correctness, then times; one JSON object a line
    scripts/gpu_gmm.py --sweep       also tries other tiles, the best of each shape named last
    scripts/gpu_gmm.py --held        instead times the largest step at the power limit, beside peers
    scripts/gpu_gmm.py --tiny        a dry run: the interpreted kernel at small shapes, on CPU too

The shapes are Qwen3-30B-A3B's: 128 experts of width 768, 8 of them for each token of width 2,048,
routed at random. bfloat16 results must agree with float32 to 5e-3 of their norm, float32's to 1e-5,
and rows that belong to no expert must be 0. Exits 1 when one is wrong.

Times are of 16 calls in one program whose routings differ, so that the weights come from
memory; one routing of a single token has 8 experts, and 16 of them have all. The floor is the
larger of (active experts' weights + rows) / 4.3 TB/s and arithmetic / 800 TFLOP/s.

--held repeats one call for two seconds, so that the card is at its power limit as in a long
prefill. Its peers are cuBLAS, with one matrix for all rows, and torch's grouped_mm where there is
torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Read when the backend starts: a graph could run calls side by side that do not need each other,
# and nothing of what is timed here is XLA's to tune.
_FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_kernels.gmm import IMPLEMENTATIONS, grouped_matmul, pallas_triton  # noqa: E402
from pallas_kernels.gmm.pallas_triton import Tile  # noqa: E402

BANDWIDTH, ARITHMETIC = 4.3e12, 800e12  # bytes and operations a second
ROUNDS, DISPATCHES = 5, 4  # best of ROUNDS, each that many programs back to back
SAMPLE = 512  # rows compared
LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}  # of relative error
NAMES = ("gate_up", "down")
Call = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of one mixture-of-experts layer, and what is proven and timed of it."""

    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    expert_width: int = 768
    tokens: tuple[int, ...] = (1, 8, 32, 64, 256, 2048, 8192)
    rotation: int = 16  # calls of one program
    names: tuple[str, ...] = NAMES  # of its matmuls
    num_uneven: int | None = None  # routings of `uneven`; None: all

    def widths(self, name: str) -> tuple[int, int]:
        """Of a row before and after."""
        if name == "gate_up":
            return self.hidden, 2 * self.expert_width
        return self.expert_width, self.hidden


TINY = Model(
    experts=8, top_k=2, hidden=64, expert_width=32,
    tokens=(40,), rotation=2, names=("down",), num_uneven=1,
)  # fmt: skip


def tile(heights: tuple[int, ...], columns: int, depth: int, warps: int, stages: int) -> Tile:
    return Tile(heights=heights, columns=columns, depth=depth, warps=warps, stages=stages)


#: By the largest number of tokens that they are tried for.
CANDIDATES = (
    (64, tile((16,), 64, 64, 4, 4), tile((16,), 64, 64, 4, 6), tile((16,), 64, 128, 4, 4),
     tile((16,), 128, 64, 4, 4), tile((16,), 32, 128, 4, 5), tile((16,), 128, 128, 8, 3)),
    (256, tile((16, 32), 64, 64, 4, 4), tile((16, 32), 128, 64, 4, 4),
     tile((16, 32), 64, 128, 4, 4), tile((32,), 128, 64, 4, 4), tile((16, 32), 128, 128, 8, 3)),
    (2048, tile((64, 128), 128, 64, 8, 3), tile((64, 128), 128, 64, 4, 3),
     tile((32, 128), 128, 64, 8, 3), tile((64, 128), 256, 64, 8, 3),
     tile((64, 128), 256, 64, 8, 4), tile((64,), 128, 64, 4, 4)),
    (1 << 30, tile((64, 128), 128, 64, 8, 3), tile((64, 128), 128, 64, 4, 3),
     tile((64, 128), 256, 64, 8, 3), tile((64, 128), 256, 64, 8, 4),
     tile((64, 256), 128, 64, 8, 4), tile((128,), 256, 64, 8, 4)),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", help="instead of the model's list")
    parser.add_argument("--implementations", nargs="+", default=["pallas_triton", "mosaic_gpu"])
    options = parser.parse_args()
    if unknown := set(options.implementations) - set(IMPLEMENTATIONS):
        parser.error(f"unknown {sorted(unknown)}; known: {', '.join(IMPLEMENTATIONS)}")
    model = TINY if options.tiny else Model()
    if options.tokens:
        model = dataclasses.replace(model, tokens=tuple(options.tokens))
    report(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if options.held:
        report(held={name: held(model, name, 0.1 if options.tiny else 2.0) for name in model.names})
        return 0
    weights = {name: make_weights(model, *model.widths(name)) for name in model.names}
    wrong, summary = 0, {}
    for implementation in ["pallas_triton_interpret"] if options.tiny else options.implementations:
        call = IMPLEMENTATIONS[implementation]
        wrong += check(model, weights, call, implementation)
        summary[implementation] = {
            name: measure_all(model, name, weights[name], call, implementation)
            for name in model.names
        }
    swept = {}
    if options.sweep:
        call = functools.partial(pallas_triton.matmul, interpret=options.tiny)
        swept = {"best": {name: sweep(model, name, weights[name], call) for name in model.names}}
    report(wrong=wrong, us_and_ratio=summary, **swept)
    return 1 if wrong else 0


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def make_weights(model: Model, width: int, out_width: int) -> jax.Array:
    shape = (model.experts, width, out_width)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * width**-0.5)
    return make(jax.random.key(width))


def make_rows(rows: int, width: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(rows), (rows, width), dtype)


def routings(model: Model, tokens: int) -> np.ndarray:
    """int32 [rotation, E]: how many rows each expert gets in each call, no two of them alike."""
    rng = np.random.default_rng(tokens)
    if tokens == 1:  # one after another all experts
        needed = model.rotation * model.top_k
        rounds = -(-needed // model.experts)
        order = np.concatenate([rng.permutation(model.experts) for _ in range(rounds)])
        chosen = order[:needed].reshape(model.rotation, 1, model.top_k)
    else:
        scores = rng.random((model.rotation, tokens, model.experts), dtype=np.float32)
        chosen = np.argpartition(scores, model.top_k, axis=-1)[..., : model.top_k]
    counts = [np.bincount(one.ravel(), minlength=model.experts) for one in chosen]
    return np.stack(counts).astype(np.int32)


def check(model: Model, weights: dict[str, jax.Array], call: Call, implementation: str) -> int:
    """Number of wrong results over token counts, uneven routings and types."""
    cases = [
        (f"{name} {case}", weights[name], sizes, spare)
        for name in model.names
        for case, sizes, spare in (
            *((f"{n} tokens", routings(model, n)[0], 0) for n in model.tokens),
            *itertools.islice(uneven(model), model.num_uneven),
        )
    ]
    few, sizes = weights["down"][:4], np.array([3, 0, 70, 130], np.int32)
    cases += [
        ("float32", jax.random.normal(jax.random.key(0), few.shape), sizes, 5),
        ("odd widths", few[:, : model.expert_width - 8, : model.hidden - 8], sizes, 5),
    ]

    def one(job: tuple[str, jax.Array, np.ndarray, int]) -> float | None:
        case, matrices, sizes, spare = job
        try:
            error = error_of(matrices, sizes, spare, call)
        except NotImplementedError:  # another implementation's
            return None
        except Exception as failure:  # every case is tried, and its error reported
            report(implementation=implementation, case=case, error=str(failure)[:300])
            return float("inf")
        if not error < LIMITS[str(matrices.dtype)]:
            report(implementation=implementation, case=case, relative_error=error)
            return float("inf")
        return error

    with ThreadPoolExecutor(8) as pool:  # compiling takes nearly all the time
        errors = [error for error in pool.map(one, cases) if error is not None]
    wrong = sum(error == float("inf") for error in errors)
    worst = max(errors, default=None)
    report(implementation=implementation, cases=len(errors), wrong=wrong, worst_error=worst)
    return wrong


def uneven(model: Model) -> Iterator[tuple[str, np.ndarray, int]]:
    """Name, rows of each expert, rows of none."""
    rng = np.random.default_rng(0)
    experts = model.experts
    one = np.zeros(experts, np.int32)
    one[experts // 2] = 300
    yield "one expert", one, 0
    yield "one expert among spare rows", one, 1000
    yield "nobody", np.zeros(experts, np.int32), 100
    yield "as many spare rows as others", np.full(experts, 67, np.int32), 67 * experts
    skewed = 1 + rng.zipf(1.3, experts).clip(0, 3000).astype(np.int32)
    skewed[rng.random(experts) < 0.3] = 0
    skewed[0] += 64 * experts
    edges = rng.choice([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257], experts)
    for case, sizes in (("skewed", skewed), ("edges", edges)):
        yield case, sizes.astype(np.int32), 8 + int(-sizes.sum() % 8)


def error_of(weights: jax.Array, sizes: np.ndarray, spare: int, call: Call) -> float:
    """Relative error of a sample of rows, the first and last of every group among them, against
    float32; infinite when a row that belongs to no group is not 0.
    """
    owned = int(sizes.sum())
    x = make_rows(owned + spare, weights.shape[1], weights.dtype).at[owned:].set(jnp.nan)
    ends = np.cumsum(sizes)
    edges = np.concatenate([ends - sizes, ends - 1])[np.tile(sizes > 0, 2)]
    others = np.random.default_rng(1).integers(0, max(owned, 1), SAMPLE)
    rows = np.unique(np.concatenate([edges, others[: SAMPLE * (owned > 0)]]))
    groups = np.searchsorted(ends, rows, side="right")
    out = jax.jit(call, static_argnames="out_dtype")(
        x, weights, jnp.asarray(sizes), out_dtype=weights.dtype
    )
    if bool(jnp.any(out[owned:] != 0)):
        return float("inf")
    if not len(rows):
        return 0.0
    expected = np.asarray(_float32_rows(x, weights, jnp.asarray(rows), jnp.asarray(groups)))
    found = np.asarray(out[rows].astype(jnp.float32))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@jax.jit
def _float32_rows(
    x: jax.Array, weights: jax.Array, rows: jax.Array, groups: jax.Array
) -> jax.Array:
    def one(at: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, matrix = x[at[0]].astype(jnp.float32), weights[at[1]].astype(jnp.float32)
        return jnp.dot(row, matrix, precision="highest")

    return jax.lax.map(one, (rows, groups))


def measure_all(
    model: Model, name: str, weights: jax.Array, call: Call, implementation: str
) -> dict[int, list[float]]:
    """Microseconds and their ratio to the floor, by tokens."""
    found = {}
    programs = compile_all([(model, tokens, weights, call) for tokens in model.tokens])
    for tokens, program in zip(model.tokens, programs, strict=True):
        facts: dict[str, Any] = {"implementation": implementation, "matmul": name, "tokens": tokens}
        if isinstance(program, NotImplementedError):
            continue
        if isinstance(program, Exception):
            report(**facts, error=str(program)[:300])
            continue
        us, floor = time_program(program, model, name, tokens, weights)
        found[tokens] = [us, round(us / floor, 2)]
        report(**facts, us=us, floor_us=round(floor, 1), ratio=found[tokens][1])
    return found


def held(model: Model, name: str, seconds: float) -> dict[str, Any]:
    """By who multiplies: microseconds of a call, TFLOP/s, the card's watts and MHz meanwhile."""
    tokens, (width, out_width) = max(model.tokens), model.widths(name)
    x, weights = make_rows(tokens * model.top_k, width), make_weights(model, width, out_width)
    sizes = jnp.asarray(routings(model, tokens)[0])
    gate = "silu" if name == "gate_up" else None
    ours, dense = jax.jit(functools.partial(grouped_matmul, gate=gate)), jax.jit(jnp.matmul)
    calls = {
        "this one, with its gate": (lambda: ours(x, weights, sizes), jax.block_until_ready),
        "cuBLAS, one matrix": (lambda: dense(x, weights[0]), jax.block_until_ready),
    }
    if jax.default_backend() == "gpu" and importlib.util.find_spec("torch"):
        calls["torch's grouped_mm"] = _of_torch(x, weights, sizes)
    work = 2 * x.shape[0] * width * out_width
    found = {}
    for who, (call, wait) in calls.items():
        wait(call())
        begin, card = time.perf_counter(), None
        with ThreadPoolExecutor(1) as pool:
            while (last := time.perf_counter()) - begin < seconds:
                if card is None and last - begin > seconds / 2:
                    card = pool.submit(_card)
                for _ in range(39):
                    call()
                wait(call())
                took = (time.perf_counter() - last) / 40
        facts = {"us": round(took * 1e6), "tflops": round(work / took / 1e12)}
        found[who] = {**facts, "card": card and card.result()}
        report(matmul=name, tokens=tokens, who=who, **found[who])
    return found


def _of_torch(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[Any, Any]:
    import torch

    rows, matrices = torch.from_dlpack(x), torch.from_dlpack(weights)
    ends = torch.cumsum(torch.from_dlpack(sizes), 0, dtype=torch.int32)
    multiply = torch.nn.functional.grouped_mm
    return lambda: multiply(rows, matrices, offs=ends), lambda _: torch.cuda.synchronize()


def _card() -> str | None:
    """Watts and MHz now."""
    if jax.default_backend() != "gpu":
        return None
    query = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def compile_all(jobs: list[tuple[Model, int, jax.Array, Call]]) -> list[Any]:
    """A compiled program for each job, or the exception that it ended with."""

    def one(job: tuple[Model, int, jax.Array, Call]) -> Any:
        model, tokens, weights, call = job
        rows = jax.ShapeDtypeStruct((tokens * model.top_k, weights.shape[1]), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((model.rotation, model.experts), jnp.int32)
        inner = jax.jit(functools.partial(call, out_dtype=jnp.dtype("bfloat16")))

        def run(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> list[jax.Array]:
            return [inner(x, weights, sizes[i]) for i in range(model.rotation)]

        try:
            return jax.jit(run).lower(rows, weights, sizes).compile()
        except Exception as error:  # a tile that does not fit the card is no failure of the others
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, jobs))


def time_program(
    program: Any, model: Model, name: str, tokens: int, weights: jax.Array
) -> tuple[float, float]:
    """Microseconds of one call, and the floor's."""
    x, all_sizes = make_rows(tokens * model.top_k, weights.shape[1]), routings(model, tokens)
    sizes = jnp.asarray(all_sizes)
    jax.block_until_ready(program(x, weights, sizes))
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(DISPATCHES):
            out = program(x, weights, sizes)
        jax.block_until_ready(out)
        best = min(best, time.perf_counter() - begin)
    width, out_width = model.widths(name)
    active = float(np.mean(np.count_nonzero(all_sizes, axis=1)))
    moved = 2 * (active * width * out_width + tokens * model.top_k * (width + out_width))
    operations = 2 * tokens * model.top_k * width * out_width
    floor = max(moved / BANDWIDTH, operations / ARITHMETIC)
    return round(best / (DISPATCHES * model.rotation) * 1e6, 1), floor * 1e6


def sweep(model: Model, name: str, weights: jax.Array, call: Call) -> dict[int, list[Any]]:
    """The fastest tile of each number of tokens; every one tried is reported."""
    found = {}
    for tokens in model.tokens:
        tiles = next(tiles for most, *tiles in CANDIDATES if tokens <= most)
        calls = [functools.partial(call, tile=tile) for tile in tiles]
        programs = compile_all([(model, tokens, weights, call) for call in calls])
        times = []
        for tile, program in zip(tiles, programs, strict=True):
            described = f"{tile.heights} {tile.columns} {tile.depth} w{tile.warps} s{tile.stages}"
            if isinstance(program, Exception):
                report(sweep=name, tokens=tokens, tile=described, error=str(program)[:200])
                continue
            us, floor = time_program(program, model, name, tokens, weights)
            report(sweep=name, tokens=tokens, tile=described, us=us, ratio=round(us / floor, 2))
            times.append((us, described))
        found[tokens] = list(min(times)) if times else []
    return found


if __name__ == "__main__":
    sys.exit(main())
