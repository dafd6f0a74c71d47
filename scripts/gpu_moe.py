#!/usr/bin/env python3
"""Proves and measures whole sparse layers on the cards that are there.

    scripts/gpu_moe.py [--ep 1] [--tp 1]     correctness, then times; one JSON line last
    scripts/gpu_moe.py --tiny                a dry run: small shapes, interpreted kernels on CPU

Layers are Qwen3-30B-A3B's: 128 experts of width 768, 8 for each token of width 2,048, bfloat16 and
random. First the routing kernels must agree with XLA's sorts, then a layer with its own kernels
with one of plain XLA, to 1e-2 of the norm; over several cards, tokens that are exchanged with those
that are summed. Times are of a program of --layers different layers, each of which adds to what the
one before gave; `floor_us` is what a card needs to read the experts that T tokens get, or to
multiply, at 4.3 TB/s and 800 TFLOP/s. Exits 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "--tiny" in sys.argv:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from jserve.batch import CallContext  # noqa: E402
from jserve.models.blueprint import Blueprint  # noqa: E402
from jserve.models.moe import sparse_mlp  # noqa: E402
from jserve.models.registry import parse_config  # noqa: E402
from jserve.weights.dummy import random_params  # noqa: E402
from pallas_kernels.gmm import grouped_matmul  # noqa: E402
from pallas_kernels.routing import sort_by_expert, take_rows, top_k  # noqa: E402
from sharding import experts  # noqa: E402
from sharding.mesh import make_mesh  # noqa: E402
from sharding.rules import Rules  # noqa: E402

Layer = Callable[[Any, jax.Array], jax.Array]
DISPATCHES = 8


def layer_of(make: Blueprint, matmul: Callable[..., jax.Array] | None) -> tuple[Layer, list[Any]]:
    """A sparse layer as a function of its parameters and x, and their specs."""
    module: Any = sparse_mlp(make, "mlp", "model.layers.0")
    if matmul is not None:
        module.matmul = matmul
    graphdef, state = nnx.split(module)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    treedef, specs = jax.tree.structure(state), [v.get_metadata()["spec"] for v in leaves]

    def call(params: Any, x: jax.Array) -> jax.Array:
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        no_rows: Any = None  # which attention reads
        context = CallContext(no_rows, jnp.ones(len(x), bool))
        return nnx.capture(merged, nnx.Intermediate)(x, context)[0]

    return call, specs


def params_of(specs: list[Any], rules: Rules, seed: int) -> list[jax.Array]:
    made = random_params(specs, rules, seed, lambda done, total: None)
    return [made[spec.path] for spec in specs]


def check_routing(sizes: list[int], num_experts: int, count: int, kernel: str) -> int:
    """Number of token counts for which kernels and sorts disagree."""
    wrong = 0
    for tokens in sizes:
        logits = jax.random.normal(jax.random.key(tokens), (tokens, num_experts), jnp.float32)
        ours, theirs = (
            jax.jit(functools.partial(top_k, count=count, implementation=name))
            for name in (kernel, "xla")
        )
        pairs = list(zip(ours(logits), theirs(logits), strict=True))
        # Half of the experts are somebody else's.
        held = num_experts // 2
        ids = jnp.minimum(pairs[1][1], held)
        both: list[Callable[..., Any]] = [
            jax.jit(functools.partial(sort_by_expert, num_experts=held, implementation=name))
            for name in (kernel, "xla")
        ]
        pairs += list(zip(both[0](ids), both[1](ids), strict=True))
        if tokens * count > 4096:
            x = jax.random.normal(jax.random.key(0), (tokens, 1024), jnp.bfloat16)
            rows = pairs[1][1].reshape(-1) % tokens
            both = [
                jax.jit(functools.partial(take_rows, implementation=name))
                for name in (kernel, "xla")
            ]
            pairs.append((both[0](x, rows), both[1](x, rows)))
        same = all(bool(jnp.array_equal(a, b)) for a, b in pairs)
        print(f"routing of {tokens} tokens: {'the same' if same else 'WRONG'}", flush=True)
        wrong += not same
    return wrong


def relative_error(a: jax.Array, b: jax.Array) -> float:
    ours, theirs = (np.asarray(v.astype(jnp.float32)) for v in (a, b))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def check_layer(make: Blueprint, sizes: list[int], ways: list[bool]) -> int:
    """Number of calls that differ from plain XLA's sum over devices."""
    plain = functools.partial(grouped_matmul, implementation="xla")
    (reference, specs), (layer, _) = layer_of(make, plain), layer_of(make, None)
    params, wrong = params_of(specs, make.rules, 0), 0
    chosen = experts.exchange_pays
    for tokens in sizes:
        x = tokens_of(make, tokens)
        experts.exchange_pays = lambda *_: False
        expected = jax.jit(reference)(params, x)
        for exchanged in ways:
            experts.exchange_pays = lambda *_, exchanged=exchanged: exchanged
            error = relative_error(jax.jit(lambda p, x: layer(p, x))(params, x), expected)
            print(f"layer, {tokens} tokens, {exchanged=}: {error=:.1e}", flush=True)
            wrong += not error < 1e-2
    experts.exchange_pays = chosen
    return wrong


def tokens_of(make: Blueprint, count: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(count), (count, make.config.hidden_size), jnp.bfloat16)
    return jax.device_put(x, make.rules.sharding())


def microseconds(layer: Layer, all_params: list[Any], x: jax.Array, rounds: int) -> float:
    """Of one of the layers, in the best of so many rounds."""

    def run(all_params: list[Any], x: jax.Array) -> jax.Array:
        for params in all_params:
            x = x + layer(params, x)
        return x

    program = jax.jit(run).lower(all_params, x).compile()
    jax.block_until_ready(program(all_params, x))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(DISPATCHES):
            out = program(all_params, x)
        jax.block_until_ready(out)
        best = min(best, time.perf_counter() - begin)
    return best / DISPATCHES / len(all_params) * 1e6


def floor_us(make: Blueprint, tokens: int) -> float:
    """Of one card, experts and their columns shared evenly."""
    moe, hidden = make.config.moe, make.config.hidden_size
    assert moe is not None
    each, devices = 3 * moe.width * hidden, make.rules.mesh.size
    active = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    seconds = max(2 * each * active / 4.3e12, 2 * each * moe.top_k * tokens / 800e12)
    return seconds / devices * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape = json.loads((ROOT / "configs" / "qwen3-30b-a3b.json").read_text())
    sizes, rounds = [1, 8, 64, 256, 2048, 8192], 5
    if options.tiny:
        shape |= {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16}
        sizes, rounds, options.layers = [8], 1, 2
    devices = jax.devices()[: options.tp * options.ep]
    rules = Rules(make_mesh(devices, tensor=options.tp, expert=options.ep), experts.EP)
    make = Blueprint(parse_config(shape), rules, "bfloat16", None)
    moe, on_gpu = make.config.moe, rules.platform == "gpu"
    assert moe is not None
    kernel = "pallas_triton" if on_gpu else "pallas_triton_interpret"
    wrong = check_routing(sizes, moe.num_experts, moe.top_k, kernel)
    shared = [size for size in sizes if size % options.ep == 0]
    wrong += check_layer(make, shared, [False, True] if options.ep > 1 else [False])
    layer, specs = layer_of(make, None)
    all_params = [params_of(specs, rules, seed) for seed in range(options.layers)]
    rows = {}
    for tokens in sizes:
        us = round(microseconds(layer, all_params, tokens_of(make, tokens), rounds), 1)
        rows[tokens] = {"us": us, "floor_us": round(floor_us(make, tokens), 1)}
        print(tokens, rows[tokens], flush=True)
    print(json.dumps({"tp": options.tp, "ep": options.ep, "wrong": wrong, "layer": rows}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
