#!/usr/bin/env python3
"""Time single steps on GPUs without an engine around them, and tell where their time goes.

    scripts/gpu_steps.py [--steps decode:256,prefill:8192] [--context 1120] [--in-order]
                         [--model configs/qwen3-8b.json] [--tp-size 1] [--ep-size 1]
                         [--profile] [--top 16] [--tiny]

A step is the forward program and the head after it, as the engine compiles them, many dispatched
back to back: `decode:N` N rows of --context tokens, `prefill:N` N tokens of prompts of 1,024. A
row's pages are random, or with --in-order follow each other. Beside scripts/gpu_perf.py's figures
it tells how long the device waits for the host. Qwen3-8B's shape unless said, bfloat16, random
weights. `floor_ms` is what an H200 needs at least: to read the weights (of experts those that the
step's tokens get, if each gets any of them) and the cached tokens at 4.3 TB/s, or to multiply at
800 TFLOP/s, divided by the number of GPUs. Prints one JSON line last.

--profile adds the kernels of a step. XLA's command buffers are off then, because the profiler does
not see into them, so those steps take longer: read shares. --tiny is a dry run, of small steps of a
tiny model, on CPU too.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
if "--profile" in sys.argv:  # read when the backend starts
    off = "--xla_gpu_enable_command_buffer="
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {off}"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jserve.config import Config, DeviceFacts, resolve  # noqa: E402
from jserve.models.architectures import find_architecture  # noqa: E402
from jserve.models.registry import build_model, parse_config  # noqa: E402
from jserve.plan import Kind, StepPlan  # noqa: E402
from jserve.runner.masks import allow_everything  # noqa: E402
from jserve.runner.programs import Programs  # noqa: E402
from jserve.runner.startup import Sizing, compiler_options, init_program  # noqa: E402
from jserve.weights.checkpoint import open_checkpoint  # noqa: E402
from jserve.weights.loader import load_params  # noqa: E402
from sharding.experts import EP  # noqa: E402
from sharding.mesh import make_mesh  # noqa: E402
from sharding.rules import TP, Rules  # noqa: E402


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed unless options say otherwise, in a pool of how many tokens, how often."""

    model: Path = ROOT / "configs" / "qwen3-8b.json"
    steps: str = "decode:64,decode:256,prefill:8192"
    context: int = 1120
    prompt: int = 1024  # tokens of each prompt that a step computes
    pool_tokens: int = 560_000
    calls: int = 12
    rounds: int = 3


DRY = Sizes(
    model=ROOT / "scripts" / "tiny.json", steps="decode:2,prefill:16",
    context=30, prompt=8, pool_tokens=256, calls=2, rounds=2,
)  # fmt: skip


class Steps:
    """Programs of the model and what they work on. `in_order`: a row's pages follow each other."""

    def __init__(
        self, path: str, in_order: bool, sizes: Sizes, *, tensor: int, expert: int
    ) -> None:
        self._in_order, self.sizes, self.devices = in_order, sizes, tensor * expert
        config = Config.from_flags(
            model_path=path, load_format="dummy", dtype="bfloat16", log_level="error",
            tp_size=tensor, ep_size=expert,
        )  # fmt: skip
        checkpoint = open_checkpoint(config.model, find_architecture)
        model_config = parse_config(checkpoint.hf_config, checkpoint.generation_config)
        self.config = model_config
        device = jax.devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit")
        facts = DeviceFacts(device.platform, device.device_kind, self.devices, memory)
        resolved = resolve(config, model_config, facts)
        mesh = make_mesh(jax.devices(), tensor=tensor, expert=expert)
        self.rules = Rules(mesh, TP if expert == 1 else EP)
        model = build_model(
            model_config, self.rules, dtype=resolved.dtype,
            attention_backend=resolved.attention_backend, page_size=resolved.page_size,
            hybrid=resolved.hybrid_swa,
        )  # fmt: skip
        self.specs = model.specs
        self.page_size, self.layers = resolved.page_size, model_config.num_layers
        self.num_pages = sizes.pool_tokens // resolved.page_size
        sizing = Sizing(model, self.rules, resolved)
        self.programs: Programs = sizing.programs(self.num_pages)
        params = load_params(
            model.specs, checkpoint, self.rules, resolved.dtype, progress=lambda done, total: None
        )
        self._params = tuple(params[spec.path] for spec in model.specs)
        self._head_params = tuple(params[path] for path in model.head_params)
        self._rng = np.random.default_rng(0)
        self._kv: Any = None
        self._state: Any = None
        self._masks: dict[int, jax.Array] = {}
        self.numbers = 0  # of a cached token in a layer

    def compile(self, steps: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """(forward, head) of each step."""
        shapes = self.programs.shapes
        num_rows = [self.held(self.rows_of(*step)) for step in steps]
        self._masks = allow_everything(num_rows, shapes.vocab, shapes.replicated)
        wanted = [init_program(shapes)]
        for (name, size), rows in zip(steps, num_rows, strict=True):
            kind = Kind.DECODE if name == "decode" else Kind.MIXED
            wanted.append(self.programs.forward(kind, self.held(size)))
            wanted.append(self.programs.head(rows, False, False))

        def build(program: Any, lowered: Any) -> Any:
            return lowered.compile(compiler_options=compiler_options(self.rules, program.key))

        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(build, program, program.lower()) for program in wanted]
            init, *rest = [job.result() for job in jobs]
        self._kv, self._state = init()
        self._fill()
        return dict(zip(steps, zip(rest[::2], rest[1::2], strict=True), strict=True))

    def _fill(self) -> None:
        """Random keys and values, the same in every layer, and random page tables."""

        def some(pool: jax.Array, key: jax.Array, layer: jax.Array) -> jax.Array:
            block = jax.random.normal(key, (self.num_pages, *pool.shape[1:]), pool.dtype)
            return jax.lax.dynamic_update_slice(pool, block, (layer * self.num_pages, 0, 0, 0))

        write = jax.jit(some, donate_argnums=0)
        pools = {"k": self._kv.k, "v": self._kv.v}
        pools = {name: pool for name, pool in pools.items() if pool is not None}  # latents: no v
        self.numbers = sum(int(np.prod(pool.shape[2:])) for pool in pools.values())
        for seed, name in enumerate(pools, 1):
            for layer in range(self.layers):
                pools[name] = write(pools[name], jax.random.key(seed), np.int32(layer))
        self._kv = self._kv._replace(**pools)
        table = self._state.page_table
        pages = self._rng.integers(1, self.num_pages, table.shape)
        if self._in_order:
            slots, columns = np.indices(table.shape)
            pages = slots * 2 * self.sizes.prompt // self.page_size + columns
            pages = 1 + pages % (self.num_pages - 1)
        placed = jax.device_put(pages.astype(np.int32), table.sharding)
        self._state = dataclasses.replace(self._state, page_table=placed)

    def rows_of(self, name: str, size: int) -> int:
        """Rows of a step, each of which samples."""
        return size if name == "decode" else max(1, size // self.sizes.prompt)

    def held(self, size: int) -> int:
        """What a program is compiled for that runs a step of this size."""
        return max(size, self.programs.buckets.rows[0])

    def plan(self, name: str, size: int, context: int) -> StepPlan:
        rows = self.rows_of(name, size)
        q_len = 1 if name == "decode" else size // rows
        each, most = np.full(rows, 1, np.int32), min(100_000, self.config.vocab_size)
        return StepPlan(
            step=0,
            kind=Kind.DECODE if name == "decode" else Kind.MIXED,
            slots=np.arange(rows, dtype=np.int32),
            q_lens=each * q_len,
            kv_lens=each * (context if name == "decode" else q_len),
            samples=np.ones(rows, bool),
            output_index=each,
            num_decode_rows=rows if name == "decode" else 0,
            token_ids=self._rng.integers(1000, most, rows * q_len).astype(np.int32),
            new_pages=np.zeros(rows * q_len, np.int32),
            full_sampler=False,
            logprobs=False,
        )

    def run(self, step: tuple[str, int], programs: Any, context: int, calls: int) -> float:
        """Seconds of one of `calls` steps."""
        (name, size), (forward, head) = step, programs
        layout = self.programs.layout(name != "decode", self.held(size))
        packed = layout.pack(self.plan(name, size, context))
        out, mask = None, self._masks[self.held(self.rows_of(name, size))]
        begin = time.perf_counter()
        for _ in range(calls):
            self._kv, self._state, hidden = forward(self._params, self._kv, self._state, packed)
            rows = (hidden.rows, hidden.slots, hidden.output_index, mask)
            self._state, out = head(self._head_params, self._state, *rows)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / calls


def floor_seconds(steps: Steps, name: str, size: int, context: int) -> float:
    """The larger of the times that bytes and products take."""
    config, moe, rows = steps.config, steps.config.moe, steps.rows_of(name, size)
    # Cached tokens that a token attends to.
    seen = context if name == "decode" else steps.sizes.prompt / 2
    share = 0.0 if moe is None else moe.top_k / moe.num_experts
    read = products = 0.0
    for spec in steps.specs:
        numbers = float(np.prod(spec.shape))
        if spec.path == "embed.weight" and not config.tie_embeddings:
            continue
        if spec.axes[0] == "expert":
            read += numbers * (1 - (1 - share) ** size)
            products += numbers * share * size
        else:
            read += numbers
            products += numbers * (rows if spec.path in ("embed.weight", "head.weight") else size)
    pairs = size * seen * config.num_layers
    products += 2 * pairs * config.num_heads * config.head_dim
    if name == "decode":
        read += pairs * steps.numbers
    return max(2 * read / 4.3e12, 2 * products / 800e12) / steps.devices


def profile(steps: Steps, step: tuple[str, int], programs: Any, context: int, top: int) -> Any:
    """Microseconds of a step by kernel, on average over GPUs, the longest first."""
    calls = 3 * steps.devices
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps.run(step, programs, context, calls // steps.devices)
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    spent: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    spent[event.name] += event.duration_ns
                    count[event.name] += 1
    for kernel, nanoseconds in spent.most_common(top):
        each = nanoseconds / count[kernel] / 1e3
        share = nanoseconds / max(1, sum(spent.values()))
        print(f"  {share:6.1%} {each:9.1f} us x {count[kernel] / calls:6.1f}  {kernel[:100]}")
    whole = sum(spent.values()) / calls / 1e6
    print(f"  {whole:.3f} ms of kernels a step", flush=True)
    return {name: round(ns / calls / 1e3, 1) for name, ns in spent.most_common(top)}


def main() -> int:
    sizes = DRY if "--tiny" in sys.argv else Sizes()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", default=sizes.steps)
    parser.add_argument("--model", default=str(sizes.model))
    parser.add_argument("--context", type=int, default=sizes.context)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    pairs = [text.split(":") for text in options.steps.split(",")]
    wanted = [(name, int(size)) for name, size in pairs]
    mesh = {"tensor": options.tp_size, "expert": options.ep_size}
    steps, rows = Steps(options.model, options.in_order, sizes, **mesh), dict[str, Any]()
    calls = [sizes.calls] * sizes.rounds
    for step, programs in steps.compile(wanted).items():
        name = f"{step[0]}_{step[1]}"
        steps.run(step, programs, options.context, 3)
        times = [steps.run(step, programs, options.context, count) for count in calls]
        floor = round(floor_seconds(steps, *step, options.context) * 1e3, 3)
        rows[name] = {"ms": [round(seconds * 1e3, 3) for seconds in times], "floor_ms": floor}
        print(name, rows[name], flush=True)
        if options.profile:
            kernels = profile(steps, step, programs, options.context, options.top)
            rows[name]["kernels_us"] = kernels
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
