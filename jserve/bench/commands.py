"""The benchmarks themselves, from parsed flags to one JSON line.

Each prints progress on standard error and its result, one line of JSON, on standard output; exit
status 1 when a request failed. What is asked, when, and of whom is the other modules' business.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tqdm

from jserve.bench.arrivals import arrival_times
from jserve.bench.compare import ARMS, compare_arms
from jserve.bench.load import run_load
from jserve.bench.plot import load_pyplot, save_plot
from jserve.bench.program import chosen, compare_work
from jserve.bench.report import parse_goodput, summarize
from jserve.bench.samples import Sample
from jserve.bench.targets import EngineTarget, HttpTarget
from jserve.bench.workload import Conversation, WorkloadOptions, make_workload
from jserve.config import Config
from jserve.config.address import http_url
from jserve.engine.engine import Engine
from jserve.errors import ConfigError, JserveError

_CLIENTS = 32  # that take turns
#: What a server that does not say is taken to have.
_VOCAB_SIZE = 32000
_PROTOCOLS = {
    **dict.fromkeys(("jserve", "sglang"), "native"),
    **dict.fromkeys(("jserve-oai", "sglang-oai", "vllm"), "openai"),
}


def one_batch(parsed: argparse.Namespace, config: Config) -> None:
    """Static batches: latency of the prefill and of a decode step, for each size."""
    if parsed.repeat < 1:
        raise ConfigError(f"--repeat must be >= 1, got {parsed.repeat}")
    sizes = [
        WorkloadOptions(
            num_prompts=batch,
            random_input_len=input_len,
            random_output_len=output_len,
            random_range_ratio=1.0,
        )
        for batch in parsed.batch_size
        for input_len in parsed.input_len
        for output_len in parsed.output_len
    ]
    with _engine(config, max(parsed.batch_size)) as engine:
        for options in sizes:
            best: dict[str, Any] = {}
            for run in range(parsed.repeat + 1):  # the first warms up
                conversations = make_workload(options, engine.model_config.vocab_size)
                engine.flush_cache()
                samples, _ = asyncio.run(_at_once(EngineTarget(engine), conversations))
                figures = _batch_figures(samples, options)
                if run and figures["total_latency"] < best.get("total_latency", np.inf):
                    best = figures
            _emit({"run_name": parsed.run_name, **best}, parsed.output_file)


def offline(parsed: argparse.Namespace, config: Config) -> None:
    """A whole workload at once through an engine in this process."""
    _workload(parsed)
    with _engine(config) as engine:
        vocab_size = engine.model_config.vocab_size
        conversations = make_workload(_workload(parsed), vocab_size)
        target = EngineTarget(engine, ignore_eos=not parsed.disable_ignore_eos, stream=False)
        for _ in range(parsed.warmup_requests):
            asyncio.run(_at_once(target, conversations[:1]))
        engine.flush_cache()
        total = sum(len(turns) for turns in conversations)
        with _bar(total) as bar:
            samples, seconds = asyncio.run(_at_once(target, conversations, bar))
        info = engine.get_server_info()
    figures = summarize(samples, seconds)
    kept = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
    result = {
        "backend": "engine",
        "dataset_name": parsed.dataset_name,
        "successful_requests": figures["completed"],
        "total_latency": seconds,
        "total_input_tokens": figures["total_input_tokens"],
        "total_output_tokens": figures["total_output_tokens"],
        "last_gen_throughput": info.get("gen_throughput", 0.0),
        **{name: figures[name] for name in kept},
        "cache_report": figures["cache_report"],
        "errors": figures["errors"],
        "error_messages": figures["error_messages"],
    }
    _emit(result, parsed.output_file)
    _require_success(samples)


def serving(parsed: argparse.Namespace) -> None:
    """Requests over HTTP as they would come, or as fast as they can."""
    _check_load(parsed)
    pyplot = None if parsed.plot is None else load_pyplot()
    goodput = parse_goodput(parsed.goodput)
    samples, info, figures = asyncio.run(_serve_load(parsed, goodput))
    result = {
        "tag": parsed.tag,
        "backend": parsed.backend,
        "dataset_name": parsed.dataset_name,
        "request_rate": parsed.request_rate if np.isfinite(parsed.request_rate) else "inf",
        "burstiness": parsed.burstiness,
        "max_concurrency": parsed.max_concurrency,
        "random_input_len": parsed.random_input_len,
        "random_output_len": parsed.random_output_len,
        "random_range_ratio": parsed.random_range_ratio,
        "server_info": info,
        **figures,
        "accept_length": info.get("avg_spec_accept_length"),
    }
    if parsed.output_details:
        result |= {
            "input_lens": [sample.prompt_len for sample in samples],
            "output_lens": [sample.output_len for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.itls for sample in samples],
            "errors_by_request": [sample.error for sample in samples],
        }
    if pyplot is not None and parsed.plot is not None:
        save_plot(pyplot, samples, parsed.plot)
    _emit(result, parsed.output_file)
    _require_success(samples)


def compare(parsed: argparse.Namespace, config: Config) -> None:
    """The same workload through engines that differ in one mechanism, answers compared."""
    _workload(parsed)
    arms = parsed.arms or list(ARMS)
    results = compare_arms(config, arms, _workload(parsed), _engine)
    _emit({"dataset_name": parsed.dataset_name, "arms": results}, parsed.output_file)
    wrong = [arm["name"] for arm in results if arm["different_answers"]]
    if wrong:
        raise JserveError(f"answers differ from the first arm's: {', '.join(wrong)}")


def program(parsed: argparse.Namespace, config: Config) -> None:
    """Programs and their calls flattened, on one engine; answers compared."""
    works = chosen(parsed.programs, parsed.items, parsed.scale)
    if parsed.repeat < 1:
        raise ConfigError(f"--repeat must be >= 1, got {parsed.repeat}")
    results = []
    with _engine(config) as engine:
        for work in works:
            print(f"{work.name}: {work.about}", file=sys.stderr)
            results.append(compare_work(engine, work, parsed.repeat))
    _emit({"programs": results}, parsed.output_file)
    wrong = [one["name"] for one in results if one["different_answers"]]
    if wrong:
        raise JserveError(f"answers differ between the arms: {', '.join(wrong)}")


def _check_load(parsed: argparse.Namespace) -> None:
    """Raises ConfigError naming the flag."""
    _workload(parsed)
    if parsed.max_concurrency is not None and parsed.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be >= 1, got {parsed.max_concurrency}")
    for name in ("request_rate", "burstiness"):
        value = getattr(parsed, name)
        if not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {value}")
    if not 0 < parsed.port < 65536:
        raise ConfigError(f"--port must be in [1, 65535], got {parsed.port}")


COMMANDS: dict[str, Callable[..., None]] = {
    "one-batch": one_batch,
    "offline": offline,
    "serving": serving,
    "compare": compare,
    "program": program,
}


async def _serve_load(
    parsed: argparse.Namespace, goodput: dict[str, float]
) -> tuple[list[Sample], dict[str, Any], dict[str, Any]]:
    """→ samples, what the server says of itself, figures."""
    headers = {"Authorization": f"Bearer {parsed.api_key}"} if parsed.api_key else {}
    base_url = parsed.base_url or http_url(parsed.host, parsed.port)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    how: dict[str, Any] = {"base_url": base_url, "headers": headers, "limits": limits}
    async with contextlib.AsyncExitStack() as stack:
        verify = httpx.create_ssl_context()  # is slow to make
        made = [httpx.AsyncClient(**how, timeout=None, verify=verify) for _ in range(_CLIENTS)]
        clients = [await stack.enter_async_context(client) for client in made]
        client = clients[0]
        await _await_ready(client, parsed.ready_check_timeout_sec)
        info = await _server_info(client)
        vocab_size = parsed.vocab_size or info.get("vocab_size") or _VOCAB_SIZE
        conversations = make_workload(_workload(parsed), vocab_size)
        target = HttpTarget(
            clients,
            _PROTOCOLS[parsed.backend],
            model=parsed.model or info.get("served_model_name") or "default",
            ignore_eos=not parsed.disable_ignore_eos,
            extra_body=parsed.extra_request_body,
        )
        for turns in conversations[: parsed.warmup_requests]:
            sample = await target.ask(turns[0].new_ids, turns[0].max_new_tokens)
            if sample.error:
                raise JserveError(f"the warm-up request failed: {sample.error}")
        if parsed.flush_cache:
            (await client.post("/flush_cache", params={"timeout": 30})).raise_for_status()
        arrivals = arrival_times(
            len(conversations), parsed.request_rate, parsed.burstiness, parsed.seed
        )
        with _bar(sum(len(turns) for turns in conversations)) as bar:
            samples, seconds = await run_load(
                target,
                conversations,
                arrivals,
                max_concurrency=parsed.max_concurrency,
                done=lambda sample: _advance(bar, sample),
            )
    return samples, info, summarize(samples, seconds, goodput)


async def _await_ready(client: httpx.AsyncClient, timeout: float) -> None:
    """Raises JserveError when the server does not answer /health within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    reason, told = "", False
    while True:
        try:
            reply = await client.get("/health", timeout=10)
            if reply.status_code == 200:
                return
            reason = f"/health answers {reply.status_code}"
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise JserveError(f"no server is ready at {client.base_url}: {reason}")
        if not told:
            print(f"waiting for {client.base_url}: {reason}", file=sys.stderr)
            told = True
        await asyncio.sleep(0.5)


async def _server_info(client: httpx.AsyncClient) -> dict[str, Any]:
    """What /server_info says; nothing for servers that have none."""
    reply = await client.get("/server_info")
    return reply.json() if reply.status_code == 200 else {}


async def _at_once(
    target: EngineTarget, conversations: Sequence[Conversation], bar: Any = None
) -> tuple[list[Sample], float]:
    return await run_load(
        target,
        conversations,
        np.zeros(len(conversations)),
        done=lambda sample: _advance(bar, sample),
    )


def _batch_figures(samples: Sequence[Sample], options: WorkloadOptions) -> dict[str, Any]:
    """The prefill ends with the last first token; decode steps are counted after it."""
    _require_success(samples)
    batch, input_len = options.num_prompts, options.random_input_len
    output_len = options.random_output_len
    start = min(sample.start for sample in samples)
    prefilled = max(sample.first for sample in samples)
    total = max(sample.last for sample in samples) - start
    prefill = prefilled - start
    late = max(samples, key=lambda sample: sample.first)  # from here on everybody decodes
    step = statistics.median(late.itls) if late.itls else 0.0
    return {
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": prefill,
        "prefill_throughput": batch * input_len / prefill,
        "median_decode_latency": step,
        "median_decode_throughput": batch / step if step else 0.0,
        "total_latency": total,
        "overall_throughput": batch * (input_len + output_len) / total,
    }


def _engine(config: Config, batch: int | None = None) -> Engine:
    """An engine with room for `batch` requests at a time."""
    flat = config.flat()
    if batch is not None and (flat["max_running_requests"] or 0) < batch:
        flat["max_running_requests"] = batch
    return Engine.from_config(Config.from_flags(**flat))


def _workload(parsed: argparse.Namespace) -> WorkloadOptions:
    names = WorkloadOptions.__dataclass_fields__
    return WorkloadOptions(**{name: value for name, value in vars(parsed).items() if name in names})


def _bar(total: int) -> tqdm.tqdm[Any]:
    return tqdm.tqdm(total=total, unit="request", file=sys.stderr, disable=not sys.stderr.isatty())


def _advance(bar: tqdm.tqdm[Any] | None, sample: Sample) -> None:
    if bar is not None:
        bar.update(1)


def _emit(result: dict[str, Any], path: str | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _require_success(samples: Sequence[Sample]) -> None:
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        raise JserveError(f"{len(errors)} of {len(samples)} requests failed, first: {errors[0]}")
    if not samples:
        raise ConfigError("the workload has no request")
