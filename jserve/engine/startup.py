"""From a Config to a Loop that serves.

Owns the order of start-up (backend, checkpoint, weights, compilation, scheduler) and what must be
set before the backend starts. The only module that knows the constructors of every room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import psutil

from jserve.cache.manager import CacheManager
from jserve.cache.window import WindowGroup
from jserve.config import Config, DeviceFacts, Resolved, resolve
from jserve.engine.channel import EngineEnd
from jserve.engine.grammar_gate import GrammarGate
from jserve.engine.grammar_queue import GrammarQueue
from jserve.engine.kv_events import open_kv_events
from jserve.engine.loop import Loop
from jserve.errors import ConfigError
from jserve.grammar.backend import Backend
from jserve.grammar.choice import choose_backend, make_backend
from jserve.grammar.jump import JumpForward
from jserve.grammar.masks import Masks
from jserve.grammar.templates import Templates
from jserve.metrics.step_clock import step_timing
from jserve.metrics.timing import UNTIMED, Timing
from jserve.models.architectures import find_architecture
from jserve.models.registry import build_model, parse_config
from jserve.runner.runner import Runner
from jserve.runner.startup import start_runner
from jserve.runner.window_share import kept_tokens
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.vocabulary import vocabulary_of
from jserve.types import KVShape, ModelConfig, Progress
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.loader import load_params
from sharding.experts import EP
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

logger = logging.getLogger("jserve.engine")

_XLA_MEM_FRACTION = "0.93"  # of a GPU; the rest is for CUDA contexts, graphs and libraries
#: Options that the scheduler takes as they are.
_AS_GIVEN = (
    *("prefill_max_requests", "retraction_policy", "req_waiting_timeout", "req_running_timeout"),
    *("enable_priority_scheduling", "schedule_low_priority_values_first"),
    *("default_priority_value", "abort_on_priority_when_disabled", "disable_priority_preemption"),
    "priority_scheduling_preemption_threshold",
)
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def build(config: Config, channel: EngineEnd) -> Loop:
    """A Loop ready to run, all compiled that it needs first; progress is told over `channel`."""

    def progress(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: channel.send(Progress(stage=stage, done=done, total=total))

    started = time.monotonic()
    _prepare_backend(config)
    checkpoint = open_checkpoint(config.model, find_architecture)
    model_config = parse_config(checkpoint.hf_config, checkpoint.generation_config)
    resolved = resolve(config, model_config, _device_facts())
    tp_size, ep_size = resolved.tp_size, resolved.ep_size
    mesh = make_mesh(jax.devices(), tensor=tp_size, expert=ep_size)
    rules = Rules(mesh, TP if ep_size == 1 else EP)
    model = build_model(
        model_config,
        rules,
        dtype=resolved.dtype,
        attention_backend=resolved.attention_backend,
        page_size=resolved.page_size,
        hybrid=resolved.hybrid_swa,
    )
    templates = Templates(functools.partial(_grammar_backend, config, checkpoint, model_config))
    told = progress("weights")
    params = load_params(model.specs, checkpoint, rules, resolved.dtype, progress=told)
    loaded = time.monotonic()
    runner = start_runner(
        model,
        params,
        rules,
        resolved,
        progress("compile"),
        compilation_cache_dir=_cache_dir(config),
        facts=(model_config,),
    )
    timing = step_timing() if config.server.enable_metrics else UNTIMED
    cache, close_events = _open_cache(resolved, runner, model.cache, timing)
    scheduler = Scheduler(_scheduler_settings(config, resolved, model_config), cache)
    masks = Masks(templates, scheduler, *_jump(config, checkpoint, scheduler))
    facts = _facts(model_config, resolved, runner) | {
        "weight_bytes": sum(array.nbytes for array in params.values()),
        "weight_seconds": round(loaded - started, 3),
        "compile_seconds": round(time.monotonic() - loaded, 3),
    }
    ends = contextlib.ExitStack()
    ends.callback(close_events)
    ends.callback(templates.close)
    return Loop(
        scheduler,
        runner,
        GrammarGate(channel, GrammarQueue(templates, lambda: scheduler.paused)),
        masks=masks,
        depth=resolved.overlap_depth,
        page_size=resolved.page_size,
        decode_log_interval=config.server.decode_log_interval,
        facts=facts,
        watchdog_timeout=config.server.watchdog_timeout,
        soft_watchdog_timeout=config.server.soft_watchdog_timeout or 0.0,
        on_close=ends.close,
    )


def _facts(model: ModelConfig, resolved: Resolved, runner: Runner) -> dict[str, Any]:
    """What `server_info` says of the engine."""
    return {
        "model_config": dataclasses.asdict(model),
        "vocab_size": model.vocab_size,
        "device": jax.devices()[0].device_kind,
        "max_total_num_tokens": (runner.num_pages - 1) * resolved.page_size,
        "max_total_num_tokens_swa": sum(n - 1 for n in runner.group_pages) * resolved.page_size,
        "max_running_requests": resolved.num_slots,
        **dataclasses.asdict(resolved),
    }


def _grammar_backend(config: Config, checkpoint: Checkpoint, model: ModelConfig) -> Backend:
    """What masks tokens, with the tokenizer that the API process has."""
    name = choose_backend(config.grammar.grammar_backend)
    if name == "none":
        raise ConfigError("--grammar-backend is none")
    tokenizer = load_tokenizer(checkpoint, config.model.tokenizer_path)
    return make_backend(name, vocabulary_of(tokenizer, model))


def _jump(config: Config, checkpoint: Checkpoint, scheduler: Scheduler) -> tuple[JumpForward, ...]:
    if not config.grammar.grammar_jump_forward:
        return ()
    return (JumpForward(load_tokenizer(checkpoint, config.model.tokenizer_path), scheduler.jump),)


def _open_cache(
    resolved: Resolved, runner: Runner, shape: KVShape, timing: Timing
) -> tuple[CacheManager, Callable[[], None]]:
    """The cache, and what ends the publishing of its events."""
    num_pages, page_size = runner.num_pages, resolved.page_size
    groups = tuple(
        WindowGroup(
            window,
            kept_tokens(window, page_size),
            num_pages=pages,
            full_pages=num_pages,
            page_size=page_size,
        )
        for group, pages in zip(shape.groups, runner.group_pages, strict=True)
        for window in [group.window or resolved.context_length]
    )
    observer, close = open_kv_events(resolved.kv_events, num_pages, resolved.page_size)
    cache = CacheManager(
        num_pages,
        resolved.page_size,
        radix=resolved.radix,
        eviction=resolved.eviction,
        protected_threshold=resolved.protected_threshold,
        timing=timing,
        observer=observer,
        groups=groups,
    )
    return cache, close


def _prepare_backend(config: Config) -> None:
    """What JAX reads once, when its backend starts; in a process where it runs, without effect."""
    execution = config.execution
    if execution.device != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[execution.device])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _XLA_MEM_FRACTION)
    flags = os.environ.get("XLA_FLAGS", "")
    num_devices = execution.tp_size * execution.ep_size
    if num_devices > 1 and "host_platform_device_count" not in flags:
        flag = f"--xla_force_host_platform_device_count={num_devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"  # of the CPU platform only


def _device_facts() -> DeviceFacts:
    device = jax.devices()[0]
    if device.platform == "cpu":
        memory: int | None = psutil.virtual_memory().available
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    capability = device.compute_capability if device.platform == "gpu" else None
    count = len(jax.devices())
    return DeviceFacts(device.platform, device.device_kind, count, memory, capability)


def _cache_dir(config: Config) -> str | None:
    name = config.execution.compilation_cache_dir
    return None if name == "off" else str(Path(name).expanduser())


def _scheduler_settings(
    config: Config, resolved: Resolved, model: ModelConfig
) -> SchedulerSettings:
    seed, given = config.model.random_seed, dataclasses.asdict(config.scheduler)
    return SchedulerSettings(
        num_slots=resolved.num_slots,
        context_length=resolved.context_length,
        page_size=resolved.page_size,
        chunked_prefill_size=resolved.chunked_prefill_size,
        max_prefill_tokens=resolved.max_prefill_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        mixed=resolved.mixed,
        mixed_chunk_size=resolved.mixed_chunk_size,
        mixed_chunk_most=resolved.mixed_chunk_most,
        policy=resolved.policy,
        schedule_conservativeness=resolved.schedule_conservativeness,
        max_queued=resolved.max_queued_requests,
        lookahead=resolved.overlap_depth,
        seed=int.from_bytes(os.urandom(7)) if seed is None else seed,
        **{name: given[name] for name in _AS_GIVEN},
    )
