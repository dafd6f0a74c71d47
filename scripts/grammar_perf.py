#!/usr/bin/env python3
"""What grammars cost beside free requests, on this machine's device.

1. Decode throughput of a batch bound by a schema of 20 fields, as a ratio to the same batch free,
   with each sampler; and by one whose masks are the dearest that we know.
2. Inter-token latency of free streams while a schema of 1 MiB and a pathological regex are being
   compiled beside them, all the time, as a ratio to the same streams alone.

    scripts/grammar_perf.py configs/qwen3-8b.json --load-format dummy --tokenizer-path DIRECTORY
    scripts/grammar_perf.py --tiny      a dry run: a few tokens of a tiny model, on CPU too

prints one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jserve import Engine  # noqa: E402
from jserve.errors import RequestError  # noqa: E402


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What options are unless they are given, and how much is thrown at the engine."""

    model: str | None = None
    load_format: str = "auto"
    tokenizer_path: str | None = None
    batch: int = 64
    tokens: int = 1024
    streams: int = 32
    repeats: int = 2
    context_length: int = 4096
    chunk: int | None = None
    warm_up: int = 8  # tokens of each arm that are not measured
    schema_bytes: int = 1 << 20
    num_hostile: int = 50  # schemas, and as many regexes


DRY = Sizes(
    str(ROOT / "scripts" / "tiny.json"), "dummy", "smollm2-135m",
    batch=2, tokens=24, streams=2, repeats=1, context_length=256, chunk=32,
    warm_up=2, schema_bytes=1 << 14, num_hostile=1,
)  # fmt: skip


def object_of(kinds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    properties = {f"field_number_{i}": kind for i, kind in enumerate(kinds)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema_of_20_fields() -> dict[str, Any]:
    """A list of records: texts, numbers, flags, choices; no answer ends within the measurement."""
    text = {"type": "string"}
    colour = {"enum": ["red", "green", "blue"]}
    kinds = [text, {"type": "integer"}, text, {"type": "number"}, text, text, colour, text]
    record = object_of([*kinds, {"type": "boolean"}, text] * 2)
    return {"type": "array", "minItems": 50, "items": record}


def schema_that_counts() -> dict[str, Any]:
    """Texts of a least length and long arrays: each token leads to a new state of the grammar."""
    text = {"type": "string", "minLength": 400}
    numbers = {"type": "array", "minItems": 50, "items": {"type": "integer"}}
    return object_of([text, numbers] * 10)


def large_schema(salt: int, size: int) -> str:
    """Of at least `size` bytes, another one for each salt."""
    one = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{i}", salt]} for i in range(200)}}
    defs: dict[str, Any] = {}
    while len(json.dumps(defs)) < size:
        for _ in range(20):
            defs[f"d{len(defs)}"] = one
    return json.dumps({"$defs": defs, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in defs]})


def pathological_regex(salt: int) -> str:
    return rf"(((a|b|ab|ba){{1,60}}c){{1,60}}d){{1,60}}{salt}"


def throughput(engine: Engine, batch: int, tokens: int, sampling: dict[str, Any]) -> float:
    """Generated tokens a second; the prompts are a few tokens."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 40_000) for _ in range(8)] for _ in range(batch)]
    params = {"max_new_tokens": tokens, "ignore_eos": True, **sampling}
    started = time.perf_counter()
    bodies = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    made = [body["meta_info"]["completion_tokens"] for body in bodies]
    assert min(made) == tokens, sorted(made)[:9]
    return sum(made) / seconds


def measure_decode(
    engine: Engine, batch: int, tokens: int, repeats: int, warm_up: int
) -> dict[str, Any]:
    schema, counting = schema_of_20_fields(), schema_that_counts()
    arms = {
        "greedy": {"temperature": 0.0},
        "greedy bound": {"temperature": 0.0, "json_schema": schema},
        "sampled": {"temperature": 1.0},
        "sampled bound": {"temperature": 1.0, "json_schema": schema},
        "greedy counting": {"temperature": 0.0, "json_schema": counting},
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for sampling in arms.values():
        throughput(engine, batch, warm_up, sampling)  # compiles the grammar, warms the path
    for _ in range(repeats):
        for name, sampling in arms.items():
            rates[name].append(throughput(engine, batch, tokens, sampling))
    text = engine.metrics.render().decode()
    total, count = (
        float(
            next(
                line for line in text.splitlines() if f"output_mask_seconds_{what}{{" in line
            ).split()[-1]
        )
        for what in ("sum", "count")
    )
    best = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "tokens_per_second": {name: round(rate, 1) for name, rate in best.items()},
        "mask_ms_per_step": round(1e3 * total / count, 3),
        "ratio_greedy": round(best["greedy bound"] / best["greedy"], 4),
        "ratio_sampled": round(best["sampled bound"] / best["sampled"], 4),
        "ratio_counting": round(best["greedy counting"] / best["greedy"], 4),
    }


async def free_streams(engine: Engine, count: int, tokens: int) -> list[float]:
    """Seconds between two tokens of each of `count` streams."""
    gaps: list[float] = []

    async def one(seed: int) -> None:
        ids = [3 + seed * 7 % 1000] * 8
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        last = 0.0
        async for _ in await engine.async_generate(
            input_ids=ids, sampling_params=params, stream=True
        ):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now

    await asyncio.gather(*(one(i) for i in range(count)))
    return gaps


async def hostile(
    engine: Engine, stop: asyncio.Event, forms: list[tuple[str, str]]
) -> dict[str, int]:
    """One such grammar after the other until told to stop; what became of them."""
    outcomes: dict[str, int] = {}
    for name, text in forms:
        if stop.is_set():
            break
        try:
            await engine.async_generate("x", {name: text, "max_new_tokens": 64})
            what = f"{name} served"
        except RequestError as error:
            what = f"{name} refused: {str(error).split(': ', 1)[-1][:60]}"
        outcomes[what] = outcomes.get(what, 0) + 1
    return outcomes


async def measure_latency(engine: Engine, count: int, tokens: int, sizes: Sizes) -> dict[str, Any]:
    await free_streams(engine, count, 16)
    alone = await free_streams(engine, count, tokens)
    stop, forms = asyncio.Event(), []
    for salt in range(sizes.num_hostile):  # written before anything is measured
        schema = large_schema(salt, sizes.schema_bytes)
        forms += [("json_schema", schema), ("regex", pathological_regex(salt))]
    attack = asyncio.create_task(hostile(engine, stop, forms))
    await asyncio.sleep(2.0)  # the workers have started
    beside = await free_streams(engine, count, tokens)
    stop.set()
    outcomes = await attack
    figures = {
        name: {
            "median_ms": round(1e3 * float(np.median(gaps)), 3),
            "p99_ms": round(1e3 * float(np.percentile(gaps, 99)), 3),
        }
        for name, gaps in (("alone", alone), ("beside", beside))
    }
    ratio = figures["beside"]["p99_ms"] / figures["alone"]["p99_ms"]
    return {**figures, "p99_ratio": round(ratio, 3), "outcomes": outcomes}


def main() -> None:
    sizes = DRY if "--tiny" in sys.argv else Sizes()
    parser = argparse.ArgumentParser(description="What grammars cost beside free requests.")
    parser.add_argument("model", nargs=None if sizes.model is None else "?", default=sizes.model)
    parser.add_argument("--load-format", default=sizes.load_format)
    parser.add_argument("--tokenizer-path", default=sizes.tokenizer_path)
    parser.add_argument("--batch", type=int, default=sizes.batch)
    parser.add_argument("--tokens", type=int, default=sizes.tokens)
    parser.add_argument("--streams", type=int, default=sizes.streams)
    parser.add_argument("--repeats", type=int, default=sizes.repeats)
    parser.add_argument("--tiny", action="store_true")
    parsed = parser.parse_args()
    with Engine(
        parsed.model,
        load_format=parsed.load_format,
        tokenizer_path=parsed.tokenizer_path,
        max_running_requests=parsed.batch,
        context_length=sizes.context_length,
        chunked_prefill_size=sizes.chunk,
        enable_metrics=True,
    ) as engine:
        info = engine.get_server_info()
        result = {"device": info["device"], "batch": parsed.batch, "tokens": parsed.tokens}
        result["decode"] = measure_decode(
            engine, parsed.batch, parsed.tokens, parsed.repeats, sizes.warm_up
        )
        print(json.dumps(result), flush=True)
        result["latency"] = asyncio.run(
            measure_latency(engine, parsed.streams, parsed.tokens, sizes)
        )
        info = engine.get_server_info()
        result["rows_masked"] = info["grammar_rows_masked_total"]
        result["recompiles"] = info["recompiles_total"]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
