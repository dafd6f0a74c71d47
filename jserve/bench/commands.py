"""The benchmarks themselves, from parsed flags to one JSON line.

Each prints progress on standard error and its result, one line of JSON, on standard output; exit
status 1 when a request failed. What is asked, when, and of whom is the other modules' business.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tqdm

from jserve.bench import arguments
from jserve.bench.arrivals import arrival_times
from jserve.bench.compare import ARMS, compare_arms
from jserve.bench.load import run_load
from jserve.bench.plot import load_pyplot, save_plot
from jserve.bench.program import chosen, compare_work
from jserve.bench.report import parse_goodput, summarize
from jserve.bench.samples import Sample
from jserve.bench.server import (
    accept_length,
    await_ready,
    find_tokenizer,
    flush_cache,
    served_name,
    server_info,
)
from jserve.bench.targets import EngineTarget, HttpTarget
from jserve.bench.wire import Asking
from jserve.bench.workload import Conversation, WorkloadOptions, make_workload
from jserve.config import Config
from jserve.config.address import http_url
from jserve.engine.engine import Engine
from jserve.errors import ConfigError, JserveError
from jserve.tokenizer.tokenizer import Tokenizer

_CLIENTS = 32  # that take turns
#: What a server that does not say is taken to have.
_VOCAB_SIZE = 32000


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
        conversations = make_workload(_workload(parsed), vocab_size, engine.tokenizer)
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
        "failed": figures["failed"],
        "error_messages": figures["error_messages"],
    }
    _emit(result, parsed.output_file)
    _require_success(samples)


def serving(parsed: argparse.Namespace) -> None:
    """Requests over HTTP as they would come, or as fast as they can."""
    _check_load(parsed)
    pyplot = None if parsed.plot is None else load_pyplot()
    goodput = parse_goodput(parsed.goodput)
    served = asyncio.run(_serve_load(parsed))
    samples, figures = served.samples, summarize(served.samples, served.seconds, goodput)
    result = {
        "tag": parsed.tag,
        "backend": parsed.backend,
        "dataset_name": parsed.dataset_name,
        "request_rate": parsed.request_rate if np.isfinite(parsed.request_rate) else "inf",
        "burstiness": parsed.burstiness,
        "max_concurrency": parsed.max_concurrency,
        "sharegpt_output_len": parsed.sharegpt_output_len,
        "random_input_len": parsed.random_input_len,
        "random_output_len": parsed.random_output_len,
        "random_range_ratio": parsed.random_range_ratio,
        "server_info": served.info,
        **figures,
        "total_input_text_tokens": figures["total_input_tokens"],
        "total_input_vision_tokens": 0,  # no dataset has images
        "total_output_tokens_retokenized": _retokenized(samples, served.tokenizer),
        "accept_length": accept_length(served.info),
    }
    if parsed.output_details:
        result |= {
            "input_lens": [sample.prompt_len for sample in samples],
            "output_lens": [sample.output_len for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.itls for sample in samples],
            "generated_texts": [sample.text for sample in samples],
            "errors": [sample.error for sample in samples],
        }
    _emit(result, parsed.output_file)
    if pyplot is not None and parsed.plot is not None:
        save_plot(pyplot, samples, parsed.plot)
    if parsed.cache_report and figures["cache_report"] is None:
        how = "jserve's and SGLang's OpenAI routes do with --enable-cache-report"
        print(f"--cache-report: the server does not tell what it cached; {how}", file=sys.stderr)
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
    wire = arguments.BACKENDS[parsed.backend]
    if parsed.return_logprob and wire != "native":
        raise ConfigError(
            f"--return-logprob is for /generate; with --backend {parsed.backend} put logprobs "
            "into --extra-request-body"
        )
    if wire == "chat" and (parsed.apply_chat_template or parsed.tokenize_prompt):
        flag = "--apply-chat-template" if parsed.apply_chat_template else "--tokenize-prompt"
        raise ConfigError(
            f"{flag} does not go with --backend {parsed.backend}: the server applies the template "
            "to texts; leave it out"
        )
    if not 0 < parsed.port < 65536:
        raise ConfigError(f"--port must be in [1, 65535], got {parsed.port}")


COMMANDS: dict[str, Callable[..., None]] = {
    "one-batch": one_batch,
    "offline": offline,
    "serving": serving,
    "compare": compare,
    "program": program,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
    """What came of a load; `info` is what the server says of itself after it."""

    samples: list[Sample]
    seconds: float
    info: dict[str, Any]
    tokenizer: Tokenizer | None


async def _serve_load(parsed: argparse.Namespace) -> _Served:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client) for client in _clients(parsed)]
        client = clients[0]
        await await_ready(client, parsed.ready_check_timeout_sec)
        info = await server_info(client)
        tokenizer = find_tokenizer(parsed.tokenizer, parsed.model, info)
        known = info.get("vocab_size")
        vocab_size = parsed.vocab_size or (known if isinstance(known, int) else _VOCAB_SIZE)
        conversations = make_workload(_workload(parsed), vocab_size, tokenizer)
        given = parsed.served_model_name or parsed.model
        asking = _asking(parsed, given or await served_name(client, info), tokenizer)
        target = HttpTarget(clients, arguments.BACKENDS[parsed.backend], asking)
        for turns in conversations[: parsed.warmup_requests]:
            sample = await target.ask(turns[0].new_ids, turns[0].max_new_tokens)
            if sample.error:
                raise JserveError(f"the warm-up request failed: {sample.error}")
        if parsed.flush_cache:
            route = "/reset_prefix_cache" if parsed.backend.startswith("vllm") else "/flush_cache"
            await flush_cache(client, route, parsed.flush_cache_timeout)
        arrivals = arrival_times(
            len(conversations), parsed.request_rate, parsed.burstiness, parsed.seed
        )
        with _bar(sum(map(len, conversations)), hidden=parsed.disable_tqdm) as bar:
            samples, seconds = await run_load(
                target,
                conversations,
                arrivals,
                max_concurrency=parsed.max_concurrency,
                done=lambda sample: _advance(bar, sample),
            )
        after = info and await server_info(client)
    return _Served(samples, seconds, after or info, tokenizer)


def _clients(parsed: argparse.Namespace) -> list[httpx.AsyncClient]:
    base_url = parsed.base_url or http_url(parsed.host, parsed.port)
    bearer = {"Authorization": f"Bearer {parsed.api_key}"} if parsed.api_key else {}
    how: dict[str, Any] = {
        "base_url": base_url,
        "headers": {**bearer, **dict(parsed.header)},
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        "verify": httpx.create_ssl_context(),  # is slow to make
    }
    try:
        return [httpx.AsyncClient(**how, timeout=None) for _ in range(_CLIENTS)]
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {base_url}: {error}") from None


def _asking(parsed: argparse.Namespace, model: str, tokenizer: Tokenizer | None) -> Asking:
    if arguments.BACKENDS[parsed.backend] == "chat" and tokenizer is None:
        raise ConfigError(
            f"--backend {parsed.backend} sends texts, and the server's tokenizer is not on this "
            "machine: give --tokenizer PATH, or use a backend of /v1/completions, which sends ids"
        )
    return Asking(
        model=model,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        ignore_eos=not parsed.disable_ignore_eos,
        stream=not parsed.disable_stream,
        return_logprob=parsed.return_logprob,
        decode=None if tokenizer is None else tokenizer.decode,
        extra_body=parsed.extra_request_body or {},
    )


def _retokenized(samples: Sequence[Sample], tokenizer: Tokenizer | None) -> int | None:
    """Tokens of the answers' texts; None when no tokenizer is known."""
    if tokenizer is None:
        return None
    good = [sample.text for sample in samples if not sample.error]
    return sum(len(tokenizer.encode(text, add_special=False)) for text in good)


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


def _bar(total: int, hidden: bool = False) -> tqdm.tqdm[Any]:
    hidden = hidden or not sys.stderr.isatty()
    return tqdm.tqdm(total=total, unit="request", file=sys.stderr, disable=hidden)


def _advance(bar: tqdm.tqdm[Any] | None, sample: Sample) -> None:
    if bar is not None:
        bar.update(1)


def _emit(result: dict[str, Any], path: str | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if path is not None:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise JserveError(f"--output-file {path}: {error.strerror}") from None


def _require_success(samples: Sequence[Sample]) -> None:
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        raise JserveError(f"{len(errors)} of {len(samples)} requests failed, first: {errors[0]}")
    if not samples:
        raise ConfigError("the workload has no request")
