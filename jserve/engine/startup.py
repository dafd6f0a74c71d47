"""From a Config to a Loop that serves.

Owns the order of start-up: backend, checkpoint, weights, compilation, scheduler. The only module
that knows the constructors of every room.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import psutil

from jserve.cache.manager import CacheManager
from jserve.cache.window import WindowGroup
from jserve.config import Config, DeviceFacts, KvEventsOptions, Resolved, num_replicas, resolve
from jserve.config.cache_dir import compilation_cache
from jserve.config.kv_events import kv_events_options
from jserve.engine.channel import EngineEnd
from jserve.engine.devices import claim_devices, num_found, own_devices
from jserve.engine.grammar_gate import GrammarGate
from jserve.engine.grammar_queue import GrammarQueue
from jserve.engine.kv_events import open_kv_events
from jserve.engine.loop import Loop
from jserve.engine.placement import Placement
from jserve.engine.stacked_loop import StackedLoop
from jserve.engine.stacked_rank import RankParts
from jserve.errors import ConfigError
from jserve.grammar.backend import Backend
from jserve.grammar.choice import choose_backend, make_backend
from jserve.grammar.jump import JumpForward
from jserve.grammar.masks import Masks
from jserve.grammar.templates import Templates
from jserve.metrics.step_clock import step_timing
from jserve.metrics.timing import UNTIMED, Timing
from jserve.models.architectures import find_architecture
from jserve.models.registry import build_model, model_config_of
from jserve.runner.expert_load import counted
from jserve.runner.jax_settings import cache_restorer, pinned
from jserve.runner.runner import Runner
from jserve.runner.stacked import StackedRunner
from jserve.runner.startup import compile_programs
from jserve.runner.window_share import kept_tokens
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.tokenizer.vocabulary import vocabulary_of, with_ends
from jserve.types import KVShape, ModelConfig, Progress
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.loader import load_params
from sharding.experts import EP
from sharding.mesh import make_mesh
from sharding.ranks import Ranks, over_ranks
from sharding.rules import TP, Rules

logger = logging.getLogger("jserve.engine")

#: Options that the scheduler takes as they are.
_AS_GIVEN = (
    *("prefill_max_requests", "retraction_policy", "req_waiting_timeout", "req_running_timeout"),
    *("enable_priority_scheduling", "schedule_low_priority_values_first"),
    *("default_priority_value", "abort_on_priority_when_disabled", "disable_priority_preemption"),
    "priority_scheduling_preemption_threshold",
)


def build(config: Config, channel: EngineEnd) -> Loop | StackedLoop:
    """A Loop ready to run, all compiled that it needs first; progress is told over `channel`."""
    folder = compilation_cache(config.execution)
    with contextlib.ExitStack() as failed, pinned():
        ends = contextlib.ExitStack()
        failed.callback(ends.close)
        ends.callback(cache_restorer(folder))
        loop = _build(config, channel, folder, ends)
        failed.pop_all()
        return loop


def _build(
    config: Config, channel: EngineEnd, cache_folder: str | None, ends: contextlib.ExitStack
) -> Loop | StackedLoop:
    """`ends` is closed when the loop is."""

    def progress(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: channel.send(Progress(stage=stage, done=done, total=total))

    started = time.monotonic()
    claim_devices(config)
    checkpoint = open_checkpoint(config.model, find_architecture)
    model_config = model_config_of(checkpoint)
    devices = own_devices(config)  # last: what is wrong with the model needs none
    found = _device_facts(config, devices)
    resolved = resolve(config, model_config, found)
    rules = _rules(devices, resolved)
    model = build_model(
        model_config,
        rules,
        dtype=resolved.dtype,
        attention_backend=resolved.attention_backend,
        page_size=resolved.page_size,
        hybrid=resolved.hybrid_swa,
    )
    loading = _loading(config, checkpoint)
    grammars = functools.partial(_grammar_backend, config, loading, model_config)
    templates = Templates(grammars, config.grammar.grammar_compile_timeout)
    told = progress("weights")
    params = load_params(model.specs, checkpoint, rules, resolved.dtype, progress=told)
    loaded = time.monotonic()
    made = compile_programs(
        model,
        params,
        rules,
        resolved,
        progress("compile"),
        compilation_cache_dir=cache_folder,
        facts=(model_config,),
        host_bytes=found.memory_bytes if found.platform == "cpu" else None,
    )
    tokenizer = loading.result()
    model_config = with_ends(model_config, tokenizer)
    runner = (Runner if rules.ranks is None else StackedRunner)(*made)
    facts = _facts(model_config, resolved, runner) | {
        "weight_bytes": sum(a.nbytes for a in params.values()) // resolved.attn_dp_size,
        "weight_seconds": round(loaded - started, 3),
        "compile_seconds": round(time.monotonic() - loaded, 3),
    }
    ends.callback(templates.close)
    parts = _Parts(config, resolved, tokenizer, model_config, model.cache, runner, templates, ends)
    return parts.stacked(channel, facts) if rules.ranks else parts.alone(channel, facts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """What a loop is made of, but for schedulers."""

    config: Config
    resolved: Resolved
    tokenizer: Tokenizer
    model_config: ModelConfig
    cache_shape: KVShape
    runner: Any  # a Runner or a StackedRunner
    templates: Templates
    ends: contextlib.ExitStack  # of the loop

    def alone(self, channel: EngineEnd, facts: dict[str, Any]) -> Loop:
        scheduler, masks = self._rank(self.config.replica.rank)
        gate = GrammarGate(channel, GrammarQueue(self.templates, lambda: scheduler.paused))
        runner = counted(self.runner, self.model_config.moe, facts)
        return Loop(scheduler, runner, gate, masks=masks, facts=facts, **self._options())

    def stacked(self, channel: EngineEnd, facts: dict[str, Any]) -> StackedLoop:
        """The ranks of --enable-dp-attention."""
        ranks = [self._rank(number) for number in range(self.resolved.attn_dp_size)]
        schedulers = [scheduler for scheduler, _ in ranks]
        queue = GrammarQueue(self.templates, lambda: any(one.paused for one in schedulers))
        blocks = {} if self.resolved.radix else {"num_blocks": 0}
        placement = Placement(len(ranks), self.resolved.page_size, **blocks)
        told = [dict(facts) for _ in ranks]
        runner = counted(self.runner, self.model_config.moe, told[0])
        measured = (runner, *self.runner.others)
        parts = [
            RankParts(number, *ranks[number], counts, told[number])
            for number, counts in enumerate(measured)
        ]
        gate, stacked = GrammarGate(channel, queue), cast(StackedRunner, runner)
        return StackedLoop(parts, stacked, gate, placement, **self._options())

    def _rank(self, number: int) -> tuple[Scheduler, Masks]:
        """The scheduler of one rank, with a cache of its own."""
        config, resolved = self.config, self.resolved
        timing = step_timing() if config.server.enable_metrics else UNTIMED
        events = kv_events_options(config.server.kv_events_config, number)
        cache, close = _open_cache(resolved, events, self.runner, self.cache_shape, timing)
        self.ends.callback(close)
        settings = _scheduler_settings(config, resolved, self.model_config, number)
        scheduler = Scheduler(settings, cache)
        return scheduler, Masks(
            self.templates, scheduler, *_jump(config, self.tokenizer, scheduler)
        )

    def _options(self) -> dict[str, Any]:
        server = self.config.server
        return {
            "depth": self.resolved.overlap_depth,
            "page_size": self.resolved.page_size,
            "decode_log_interval": server.decode_log_interval,
            "watchdog_timeout": server.watchdog_timeout,
            "soft_watchdog_timeout": server.soft_watchdog_timeout or 0.0,
            "on_close": self.ends.close,
        }


def _rules(devices: Sequence[Any], resolved: Resolved) -> Rules:
    ranks, tensor, expert = resolved.attn_dp_size, resolved.tp_size, resolved.ep_size
    preset = TP if expert == 1 else EP
    if ranks == 1:
        return Rules(make_mesh(devices, tensor=tensor, expert=expert), preset)
    split = "expert_mlp" if tensor % ranks == 0 else "expert"  # which the ranks have parts of
    sizes = (tensor // ranks, expert) if split == "expert_mlp" else (1, expert // ranks)
    mesh = make_mesh(devices, data=ranks, tensor=sizes[0], expert=sizes[1])
    return Rules(mesh, over_ranks(preset, split), Ranks(mesh))


def _facts(model: ModelConfig, resolved: Resolved, runner: Any) -> dict[str, Any]:
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


def _loading(config: Config, checkpoint: Checkpoint) -> Future[Tokenizer]:
    """The tokenizer that the API process has, while weights are read and programs compiled."""
    thread = concurrent.futures.ThreadPoolExecutor(1, "jserve-tokenizer")
    loading = thread.submit(load_tokenizer, checkpoint, config.model.tokenizer_path)
    thread.shutdown(wait=False)
    return loading


def _grammar_backend(config: Config, loading: Future[Tokenizer], model: ModelConfig) -> Backend:
    """What masks tokens."""
    name = choose_backend(config.grammar.grammar_backend)
    if name == "none":
        raise ConfigError("--grammar-backend is none")
    tokenizer = loading.result()
    return make_backend(name, vocabulary_of(tokenizer, with_ends(model, tokenizer)))


def _jump(config: Config, tokenizer: Tokenizer, scheduler: Scheduler) -> tuple[JumpForward, ...]:
    return (JumpForward(tokenizer, scheduler.jump),) if config.grammar.grammar_jump_forward else ()


def _open_cache(
    resolved: Resolved,
    events: KvEventsOptions | None,
    runner: Any,
    shape: KVShape,
    timing: Timing,
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
    observer, close = open_kv_events(events, num_pages, resolved.page_size)
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


def _device_facts(config: Config, devices: Sequence[Any]) -> DeviceFacts:
    device = devices[0]
    if device.platform == "cpu":
        available = psutil.virtual_memory().available
        memory: int | None = available // num_replicas(config.execution)
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    capability = device.compute_capability if device.platform == "gpu" else None
    count = num_found(config)
    return DeviceFacts(device.platform, device.device_kind, count, memory, capability)


def _scheduler_settings(
    config: Config, resolved: Resolved, model: ModelConfig, rank: int
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
        # each rank draws other seeds for the requests that have none
        seed=int.from_bytes(os.urandom(7)) if seed is None else seed + (rank << 32),
        **{name: given[name] for name in _AS_GIVEN},
    )
