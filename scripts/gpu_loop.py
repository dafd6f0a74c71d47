#!/usr/bin/env python3
"""Tells how the time of whole runs divides among steps, by what the engine's log says of each.

    scripts/gpu_loop.py [--runs offline,shared,online_24,online_8] [--tiny]

The runs are those of scripts/gpu_perf.py, on the same engine and without a server: `online_N` are N
requests a second for 20 seconds. Steps with prompts are grouped by their tokens, decode rows
included, up to the next power of two; `seconds` is their sum, `ms` the median, `rows` the median of
running requests. What they leave of a run is its steps without prompts, and waits. Prints one JSON
line last. --tiny is a dry run: a few requests to a tiny model, on CPU too.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jserve.bench.load import run_load  # noqa: E402
from jserve.bench.targets import EngineTarget  # noqa: E402
from jserve.engine.engine import Engine  # noqa: E402
from scripts.gpu_perf import DRY, RATES, SECONDS, Bench, Sizes  # noqa: E402

PREFILL = re.compile(
    r"Prefill batch.*#new-token: (\d+),.*#running-req: (\d+),.*throughput \(token/s\): ([\d.]+)"
)


def online(bench: Bench, rate: int) -> float:
    """Seconds of a run whose requests come at random, `rate` a second."""
    bench.engine.flush_cache()
    prompts = bench.conversations(rate * SECONDS, 1024, 256)
    waits = np.random.default_rng(1).exponential(1 / rate, len(prompts))
    target = EngineTarget(bench.engine, stream=True)
    _, seconds = asyncio.run(run_load(target, prompts, np.cumsum(waits)))
    return seconds


def runs_of(bench: Bench, wanted: list[str]) -> dict[str, Callable[[], float]]:
    """Seconds of each run that is asked for, in order."""
    plain = bench.conversations(512, 1024, 256)
    shared = bench.conversations(512, 128, 64, shared_len=2048)
    known: dict[str, dict[str, Callable[[], float]]] = {
        "offline": {"offline": lambda: bench.load(plain)["s"]},
        "shared": {
            "shared_cold": lambda: bench.load(shared)["s"],
            "shared_warm": lambda: bench.load(shared, flush=False)["s"],
        },
        **{
            f"online_{rate}": {f"online_{rate}": lambda rate=rate: online(bench, rate)}
            for rate in RATES
        },
    }
    return {name: run for group in wanted for name, run in known[group].items()}


def divided(seconds: float, lines: list[str]) -> dict[str, Any]:
    """How `seconds` divide among the steps that `lines` tell of."""
    mixed: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)
    for new, rows, rate in (found.groups() for line in lines if (found := PREFILL.search(line))):
        size = 1 << (int(new) + int(rows) - 1).bit_length()
        mixed[size].append((int(new) / float(rate), int(rows)))
    steps: dict[str, Any] = {}
    for size, those in sorted(mixed.items()):
        took, rows = zip(*those, strict=True)
        steps[f"up to {size} tokens"] = {
            "steps": len(those),
            "seconds": round(sum(took), 2),
            "ms": round(statistics.median(took) * 1e3, 1),
            "rows": statistics.median(rows),
        }
    count = sum("Decode batch" in line for line in lines)
    left = seconds - sum(row["seconds"] for row in steps.values())
    steps["without prompts"] = {"steps": count, "seconds": round(left, 2)}
    return {"seconds": round(seconds, 2), **steps}


def measure(log: IO[str], wanted: list[str], sizes: Sizes) -> dict[str, Any]:
    flags = {**sizes.flags, "log_level": "info", "decode_log_interval": 1}
    found = {}
    with Engine(str(sizes.model), **flags) as engine:
        while engine.get_server_info()["programs_pending"]:
            time.sleep(0.5)
        for name, run in runs_of(Bench(engine, sizes), wanted).items():
            log.seek(0, os.SEEK_END)
            begin = log.tell()
            seconds = run()
            engine.get_server_info()  # its lines are written by now
            log.seek(begin)
            found[name] = divided(seconds, log.read().splitlines())
            print(name, found[name], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", default="offline,shared,online_24,online_8")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes = DRY if options.tiny else Sizes()
    errors = os.dup(2)
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 2)  # before the engine's process starts, which logs there
        try:
            print(json.dumps(measure(log, options.runs.split(","), sizes)))
        finally:
            os.dup2(errors, 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
