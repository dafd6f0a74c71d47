"""Speed of the Qwen3-8B shape (bfloat16, random weights, greedy) on one GPU beside its roofline.

`scripts/gpu_check --perf` runs it; docs/performance/ keeps its JSON. Everything goes through the
engine or the server at default flags, with the recompile guard on "error". A row that fails says
so in its place, and the others are measured. With --tiny as well they are shares of the rows, of a
tiny model, on CPU too: a dry run, whose figures mean nothing.

Roofline of a step: for each phase (matmuls, attention, head) the greater of bytes / BANDWIDTH and
FLOPs / COMPUTE, the copy bandwidth and a sustained matmul rate of an H200.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.bench.load import run_load
from jserve.bench.targets import EngineTarget
from jserve.bench.workload import Conversation, Turn
from jserve.engine.engine import Engine
from scripts.gpu_targets import compared

ROOT = Path(__file__).resolve().parents[1]
BANDWIDTH, COMPUTE, MATMUL_PEAK = 4.3e12, 800e12, 804e12  # bytes/s, FLOP/s
ITEM = 2  # bytes of a bfloat16
FLAGS: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "recompile_guard": "error"}
SHORT, LONG = 32, 160  # output tokens of the two runs whose difference is timed
RATES, SECONDS = (8, 16, 24), 20  # requests a second, and for how long they come
GROUPS = ("start", "online", "http", "decode", "sampler", "long", "prefill", "offline", "shared")
Row = dict[str, Any]


def nvidia_smi(query: str, units: str = "csv,noheader,nounits") -> list[str]:
    """What it tells of the first card, by the names in `query`."""
    command = ["nvidia-smi", f"--query-gpu={query}", f"--format={units}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[0].split(", ")


def no_card(query: str, units: str = "") -> list[str]:
    """In its place in a dry run."""
    return ["1" for _ in query.split(",")]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and what the rows' numbers of requests and of tokens are divided by."""

    model: Path = ROOT / "configs" / "qwen3-8b.json"
    flags: Row = dataclasses.field(default_factory=lambda: FLAGS)
    by_requests: int = 1
    by_tokens: int = 1
    smi: Callable[..., list[str]] = nvidia_smi

    def requests(self, count: int) -> int:
        return max(1, count // self.by_requests)

    def tokens(self, count: int) -> int:
        return max(1, count // self.by_tokens)


_FEW = {"context_length": 1024, "max_running_requests": 2, "chunked_prefill_size": 32}
DRY = Sizes(
    model=ROOT / "scripts" / "tiny.json", flags=FLAGS | _FEW,
    by_requests=128, by_tokens=64, smi=no_card,
)  # fmt: skip


class Roofline:
    """Seconds that a step of the model takes at least."""

    def __init__(self, shape: dict[str, Any]) -> None:
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        heads, kv_heads, head_dim = (
            shape["num_attention_heads"],
            shape["num_key_value_heads"],
            shape["head_dim"],
        )
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        self.body = layers * (attention + 3 * hidden * shape["intermediate_size"])  # parameters
        self.head = hidden * shape["vocab_size"]
        self.kv_bytes = layers * 2 * kv_heads * head_dim * ITEM  # a token
        self.attend_flops = layers * 4 * heads * head_dim  # a query and a key

    def decode(self, batch: int, context: float) -> float:
        body = _phase(self.body * ITEM, 2 * self.body * batch)
        head = _phase(self.head * ITEM, 2 * self.head * batch)
        keys = batch * context
        return body + head + _phase(keys * self.kv_bytes, keys * self.attend_flops)

    def prefill_flops(self, new: int, cached: int = 0) -> float:
        """FLOPs of `new` tokens behind `cached` ones, the head for one row."""
        keys = new * cached + new * (new + 1) / 2
        return 2 * self.body * new + keys * self.attend_flops + 2 * self.head


def _phase(num_bytes: float, flops: float) -> float:
    return max(num_bytes / BANDWIDTH, flops / COMPUTE)


class Bench:
    """Figures of one running engine."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self.engine, self.sizes = engine, sizes
        self.vocab = engine.model_config.vocab_size
        self.roofline = Roofline(json.loads(sizes.model.read_text()))
        self._rng = np.random.default_rng(0)

    def ids(self, length: int) -> list[int]:
        return self._rng.integers(1000, self.vocab, length).tolist()

    def conversations(
        self, count: int, prompt_len: int, output_len: int, shared_len: int = 0
    ) -> list[Conversation]:
        """Single turns, all behind the same `shared_len` tokens."""
        shared = self.ids(self.sizes.tokens(shared_len)) if shared_len else []
        each, answer = self.sizes.tokens(prompt_len), self.sizes.tokens(output_len)
        count = self.sizes.requests(count)
        return [(Turn(shared + self.ids(each), answer),) for _ in range(count)]

    def seconds(self, prompts: Sequence[list[int]], count: int, **sampling: Any) -> float:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling}
        start = time.perf_counter()
        replies = self.engine.generate(input_ids=list(prompts), sampling_params=params)
        seconds = time.perf_counter() - start
        assert all(len(reply["output_ids"]) == count for reply in replies)
        return seconds

    def decode(self, batch: int, context: int = 1024, **sampling: Any) -> dict[str, float]:
        """A decode step at a mean context of `context` + (SHORT + LONG) / 2."""
        batch, context = self.sizes.requests(batch), self.sizes.tokens(context)
        prompts = [self.ids(context) for _ in range(batch)]
        self.seconds(prompts, SHORT, **sampling)  # fills the prefix cache
        runs = [
            self.seconds(prompts, LONG, **sampling) - self.seconds(prompts, SHORT, **sampling)
            for _ in range(3)
        ]
        step = statistics.median(runs) / (LONG - SHORT)
        least = self.roofline.decode(batch, context + (SHORT + LONG) / 2)
        self.engine.flush_cache()
        return {
            "ms": round(step * 1e3, 2),
            "roofline_ms": round(least * 1e3, 2),
            "of_roofline": round(step / least, 3),
        }

    def prefill(self, batch: int, new: int, cached: int = 0) -> dict[str, float]:
        """One token each of prompts whose first `cached` tokens were seen before."""
        batch, new = self.sizes.requests(batch), self.sizes.tokens(new)
        cached = self.sizes.tokens(cached) if cached else 0
        best = float("inf")
        for _ in range(3):
            self.engine.flush_cache()
            prefixes = [self.ids(cached) for _ in range(batch)]
            if cached:
                self.seconds(prefixes, 1)
            prompts = [prefix + self.ids(new) for prefix in prefixes]
            best = min(best, self.seconds(prompts, 1))
        flops = batch * self.roofline.prefill_flops(new, cached)
        return {
            "s": round(best, 4),
            "tokens_per_s": round(batch * new / best),
            "roofline_tokens_per_s": round(batch * new / (flops / COMPUTE)),
            "of_matmul_peak": round(flops / best / MATMUL_PEAK, 3),
        }

    def load(self, conversations: Sequence[Conversation], flush: bool = True) -> dict[str, float]:
        """A whole workload at once."""
        if flush:
            self.engine.flush_cache()
        target = EngineTarget(self.engine, stream=False)
        begins = np.zeros(len(conversations))
        samples, seconds = asyncio.run(run_load(target, conversations, begins))
        errors = [sample.error for sample in samples if sample.error]
        assert not errors, errors[0]
        tokens = sum(sample.prompt_len + sample.output_len for sample in samples)
        return {
            "s": round(seconds, 2),
            "requests_per_s": round(len(samples) / seconds, 1),
            "total_tokens_per_s": round(tokens / seconds),
            "output_tokens_per_s": round(sum(s.output_len for s in samples) / seconds),
        }


class Table:
    """Rows as they are measured: a failure is a row too, and is printed like one."""

    def __init__(self, groups: set[str]) -> None:
        self.groups, self.rows = groups, dict[str, Any]()

    def wants(self, *groups: str) -> bool:
        return not self.groups.isdisjoint(groups)

    def row(self, name: str, group: str, measure: Callable[[], Row]) -> None:
        if not self.wants(group):
            return
        begin = time.perf_counter()
        try:
            self.rows[name] = measure()
        except Exception as error:  # every row is tried; its own line tells what failed
            self.rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(f"{name} ({time.perf_counter() - begin:.0f} s): {self.rows[name]}", flush=True)


def engine_rows(table: Table, cache: str, sizes: Sizes) -> None:
    """What an engine of this process shows."""
    with Engine(str(sizes.model), compilation_cache_dir=cache, **sizes.flags) as engine:
        bench = Bench(engine, sizes)
        for batch in (1, 8, 32, 64, 128, 256):
            table.row(f"decode_{batch}", "decode", functools.partial(bench.decode, batch))
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "frequency_penalty": 0.1}
        table.row("full_sampler_256", "sampler", lambda: bench.decode(256, **sampled))
        table.row("decode_64_at_8k", "long", lambda: bench.decode(64, 8192 - 96))
        table.row("decode_1_at_32k", "long", lambda: bench.decode(1, 32_768 - 96))
        table.row("prefill_512x1024", "prefill", lambda: bench.prefill(512, 1024))
        table.row("prefill_1x8192", "prefill", lambda: bench.prefill(1, 8192))
        table.row("prefill_16x512", "prefill", lambda: bench.prefill(16, 512))
        table.row("prefill_4k_on_28k", "prefill", lambda: bench.prefill(1, 4096, 28_672))
        plain = bench.conversations(512, 1024, 256)
        table.row("offline_512", "offline", lambda: bench.load(plain))
        behind = bench.conversations(512, 128, 64, shared_len=2048)
        table.row("shared_prefix_cold", "shared", lambda: bench.load(behind))
        table.row("shared_prefix_warm", "shared", lambda: bench.load(behind, flush=False))
        streams = bench.conversations(256, 128, 512)
        table.row("engine_256_streams", "http", lambda: bench.load(streams))
        table.rows["engine"] = engine_facts(engine, sizes)


def engine_facts(engine: Engine, sizes: Sizes) -> Row:
    info = engine.get_server_info()
    kept = ("max_total_num_tokens", "recompiles_total", "weight_bytes", "compile_seconds")
    facts = {name: info[name] for name in kept}
    used, total = (float(x) for x in sizes.smi("memory.used,memory.total"))
    roofline = Roofline(json.loads(sizes.model.read_text()))
    kv_bytes = info["max_total_num_tokens"] * roofline.kv_bytes
    of_card = (info["weight_bytes"] + kv_bytes) / (total * (1 << 20))
    return facts | {"memory_held": round(used / total, 3), "weights_and_kv": round(of_card, 3)}


def server_rows(table: Table, cache: str, sizes: Sizes) -> None:
    """Start of the server, cold and warm, and what a client in another process sees."""
    if table.wants("start"):
        table.row("start_cold", "start", lambda: started(cache, sizes))
    if table.wants("start", "online", "http"):
        with server(cache, sizes) as (url, times):
            table.row("start_warm", "start", lambda: times)
            lengths = _lengths(sizes.tokens(1024), sizes.tokens(256))
            for rate in RATES:
                count = ("--num-prompts", str(sizes.requests(rate * SECONDS)))
                ask = functools.partial(client, url, *lengths, *count, "--request-rate", str(rate))
                table.row(f"online_{rate}", "online", ask)
            lengths = _lengths(sizes.tokens(128), sizes.tokens(512))
            count = ("--num-prompts", str(sizes.requests(256)))
            table.row("http_256_streams", "http", lambda: client(url, *lengths, *count))


def _lengths(prompt_len: int, output_len: int) -> tuple[str, ...]:
    return ("--random-input-len", str(prompt_len), "--random-output-len", str(output_len))


def started(cache: str, sizes: Sizes) -> Row:
    with server(cache, sizes) as (_, times):
        return times


@contextlib.contextmanager
def server(cache: str, sizes: Sizes) -> Iterator[tuple[str, dict[str, float]]]:
    """(base URL, seconds from process start to first ready and to everything compiled)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jserve", "serve", str(sizes.model), "--port", str(port)]
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sizes.flags.items()]
    flags = itertools.chain.from_iterable(given)
    quiet = ["--log-level", "warning", "--compilation-cache-dir", cache]
    start = time.perf_counter()
    process = subprocess.Popen([*command, *flags, *quiet], cwd=ROOT)
    try:
        ready = _wait(process, url, lambda info: True) - start
        compiled = _wait(process, url, _all_compiled) - start
        yield url, {"ready_s": round(ready, 1), "compiled_s": round(compiled, 1)}
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, reached: Any) -> float:
    """When /server_info first showed what `reached` asks for."""
    while True:
        assert process.poll() is None, "the server ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/server_info") as reply:
            if reached(json.load(reply)):
                return time.perf_counter()
        time.sleep(0.2)


def _all_compiled(info: Row) -> bool:
    return not info["internal_states"][0]["programs_pending"]


def client(url: str, *flags: str) -> dict[str, float]:
    """The benchmark's own client, in a process of its own."""
    command = [sys.executable, "-m", "jserve", "bench", "serving", "--base-url", url]
    fixed = ["--backend", "jserve-oai", "--random-range-ratio", "1.0", "--flush-cache"]
    done = subprocess.run(
        [*command, *fixed, *flags], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    figures = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_latency_ms")
    kept = [f"{kind}_{name}" for name in figures for kind in ("median", "p99")]
    kept += ["duration", "completed", "output_throughput", "request_throughput"]
    return {name: round(result[name], 2) for name in kept}


def card(sizes: Sizes) -> dict[str, str]:
    names = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    return dict(zip(names.split(","), sizes.smi(names, units="csv,noheader"), strict=True))


def measure(only: Sequence[str], sizes: Sizes) -> Row:
    """The rows of the GROUPS named, or all: figures first, what they are to reach beside them."""
    unknown = set(only) - set(GROUPS)
    if unknown:
        raise SystemExit(f"unknown groups {sorted(unknown)}; known: {', '.join(GROUPS)}")
    table = Table(set(only or GROUPS))
    before = card(sizes)
    with tempfile.TemporaryDirectory() as cache:
        stages: tuple[tuple[str, Callable[[Table, str, Sizes], None]], ...] = (
            ("server", server_rows),
            ("engine", engine_rows),
        )
        for name, stage in stages:
            try:
                stage(table, cache, sizes)
            except Exception as error:  # the other stage has figures of its own
                table.rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": before,
        "card_after": card(sizes),
        "jax": jax.__version__,
        "rows": compared(table.rows),
    }
