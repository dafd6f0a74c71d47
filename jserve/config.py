"""The one frozen tree of options, and `resolve`: from options to the numbers the engine runs with.

Owns names, defaults, help and checks of every option: the command line and YAML files derive from
the fields below, whose names are SGLang's where it has the option. Refuses to know how an option is
carried out, and imports no jax: `resolve` is handed model and devices as plain records.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from jserve.errors import ConfigError
from jserve.types import ModelConfig

_GIB = 1 << 30
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
#: Attention implementations that are for one platform; the others run everywhere.
_BACKEND_PLATFORM = {"pallas_triton": "gpu", "jax_triton": "gpu", "mosaic_tpu": "tpu"}


def _option(
    default: Any, about: str, choices: str = "", low: Any = None, high: Any = None, also: str = ""
) -> Any:
    """A field with its help, choices (blanks between), range [low, high] and second flag."""
    metadata = {"about": about, "choices": choices.split(), "low": low, "high": high, "also": also}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """model: weights, tokenizer, number format"""

    model_path: str = _option(
        "", "directory, hub id, .gguf, Orbax, configs/*.json, or smollm2-135m", also="--model"
    )
    tokenizer_path: str | None = _option(None, "directory or hub id [the model's]")
    revision: str | None = _option(None, "branch, tag or commit on the hub")
    load_format: str = _option(
        "auto", "dummy is random weights", choices="auto safetensors gguf orbax dummy"
    )
    dtype: str = _option(
        "auto", "the checkpoint's, float32 on CPU", choices="auto float32 bfloat16"
    )
    context_length: int | None = _option(None, "longest prompt + output [the model's]", low=2)
    served_model_name: str | None = _option(None, "name in the API [model-path]")
    chat_template: str | None = _option(None, "Jinja file or text [the model's]")
    random_seed: int | None = _option(None, "seed of unseeded requests [random]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """server: address, key, streaming, logs"""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(30000, "port to listen on", low=0, high=65535)
    api_key: str | None = _option(None, "bearer key that clients must send")
    stream_interval: int = _option(1, "tokens in a streamed chunk", low=1)
    enable_metrics: bool = _option(False, "Prometheus metrics at /metrics")
    metrics_prefix: str = _option("jserve", "before the colon of every metric's name")
    enable_cache_report: bool = _option(False, "cached_tokens in usage")
    log_requests: bool = _option(False, "log every request")
    log_level: str = _option("info", "least level", choices="debug info warning error critical")
    watchdog_timeout: float = _option(300.0, "seconds that one step may take", low=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """cache: the paged KV pool and the radix cache over it"""

    mem_fraction_static: float | None = _option(
        None, "memory share of weights and KV [by device]", low=0.01, high=0.99
    )
    max_total_tokens: int | None = _option(None, "tokens in the KV pool [by memory]", low=1)
    page_size: int = _option(16, "tokens in a page", low=1, high=1024)
    kv_cache_dtype: str = _option("auto", "as dtype", choices="auto float32 bfloat16")
    disable_radix_cache: bool = _option(False, "reuse no prefixes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """scheduler: what runs in a step, in which order"""

    max_running_requests: int | None = _option(
        None, "requests in a batch [32 on CPU, else 256]", low=1, high=4096
    )
    max_queued_requests: int | None = _option(None, "waiting requests before 503 [any]", low=1)
    chunked_prefill_size: int | None = _option(
        None, "prompt tokens in a step; -1: whole prompts [by memory]", low=-1
    )
    max_prefill_tokens: int = _option(16384, "prompt tokens admitted at a time", low=1)
    disable_mixed_chunk: bool = _option(False, "no decode rows beside prompt chunks")
    schedule_policy: str = _option(
        "fcfs", "order of the queue", choices="fcfs lpm random lof dfs-weight"
    )
    schedule_conservativeness: float = _option(1.0, "higher: admit fewer, retract fewer", low=0)
    disable_overlap_schedule: bool = _option(False, "plan a step only after the last one")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """execution: devices, kernels, compilation"""

    device: str = _option("auto", "platform", choices="auto cpu gpu tpu")
    tp_size: int = _option(1, "tensor parallel devices", low=1, also="--tp")
    attention_backend: str | None = _option(
        None, "[the first that fits]", choices="reference xla pallas_triton jax_triton mosaic_tpu"
    )
    recompile_guard: str = _option("warn", "on a compilation after ready", choices="off warn error")
    compilation_cache_dir: str = _option("~/.cache/jserve/compile", "compiled programs; off: none")


_SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelOptions,
    "server": ServerOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "execution": ExecutionOptions,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option. Construction checks each value alone; `resolve` checks them together.

    Flat names are unique over the sections: `config.flat()["page_size"]` is
    `config.cache.page_size`. Raises ConfigError.
    """

    model: ModelOptions = ModelOptions()
    server: ServerOptions = ServerOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    execution: ExecutionOptions = ExecutionOptions()

    def __post_init__(self) -> None:
        values = self.flat()
        for _, option in _options():
            _check_value(option, values[option.name])
        if not self.model.model_path:
            raise ConfigError("--model-path is required, e.g. --model-path smollm2-135m")

    @classmethod
    def from_flags(cls, **flat: Any) -> Config:
        """Config from flat names, e.g. `from_flags(model_path="smollm2-135m", page_size=1)`."""
        section_of = {option.name: section for section, option in _options()}
        values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for name, value in flat.items():
            if name not in section_of:
                raise ConfigError(unknown_option(name))
            values[section_of[name]][name] = value
        return cls(**{name: section(**values[name]) for name, section in _SECTIONS.items()})

    @classmethod
    def from_yaml(cls, path: str, **overrides: Any) -> Config:
        """Config from a YAML mapping of flag names (dashes or underscores); `overrides` win."""
        try:
            with open(path, encoding="utf-8") as file:
                loaded = yaml.safe_load(file)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--config {path} cannot be read: {reason}") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"--config {path} must map flag names to values")
        flat = {str(name).replace("-", "_"): value for name, value in loaded.items()}
        return cls.from_flags(**flat | overrides)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Config:
        """Config from what `add_arguments` parsed; given flags win over the file of --config."""
        names = {option.name for _, option in _options()}
        flat = {name: value for name, value in vars(namespace).items() if name in names}
        if namespace.config is None:
            return cls.from_flags(**flat)
        return cls.from_yaml(namespace.config, **flat)

    def flat(self) -> dict[str, Any]:
        """All options by their flat names."""
        sections = dataclasses.asdict(self).values()
        return {name: value for section in sections for name, value in section.items()}


def add_arguments(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """Add --config and every option to `parser`, one group a section, without those in `skip`.

    A flag that is not given leaves no attribute behind, so that it does not override the file.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file of these flags")
    for name, section in _SECTIONS.items():
        if name not in skip:
            group = parser.add_argument_group(section.__doc__)
            for option in dataclasses.fields(section):
                _add_argument(group, option)


def unknown_option(name: str, others: Collection[str] = ()) -> str:
    """The message for an option that is not there, with the nearest that is (`others` too)."""
    known = [*others, *(option.name for _, option in _options())]
    if name in known:
        return f"{_flag(name)} is not for this command"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {_flag(near[0])}?" if near else ""
    return f"unknown option {_flag(name)}{hint}"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`platform` is cpu, gpu or tpu; `memory_bytes` is one device's, or the free RAM on CPU."""

    platform: str
    kind: str
    count: int
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The numbers the engine runs with; nothing is automatic but the pool's size on a device.

    `chunked_prefill_size` is a multiple of page_size; it holds the whole context when chunking is
    off. `max_total_tokens` is a multiple of page_size, or None: as much as `mem_fraction_static`
    leaves once the steps are compiled.
    """

    dtype: str
    kv_dtype: str
    context_length: int
    page_size: int
    num_slots: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    mixed: bool
    policy: str
    radix: bool
    overlap_depth: int
    tp_size: int
    attention_backend: str | None
    max_total_tokens: int | None
    mem_fraction_static: float
    recompile_guard: str
    schedule_conservativeness: float
    max_queued_requests: int | None


def resolve(config: Config, model: ModelConfig, device: DeviceFacts) -> Resolved:
    """Every number from options, model and devices. Pure. Raises ConfigError naming both flags."""
    cache, scheduler, execution = config.cache, config.scheduler, config.execution
    on_cpu = device.platform == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu or model.dtype == "float32" else "bfloat16"
    kv_dtype = dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
    context_length = config.model.context_length or model.max_position
    for problem in _conflicts(config, model, device, dtype, context_length):
        raise ConfigError(problem)
    num_slots = scheduler.max_running_requests or (32 if on_cpu else 256)
    chunk, max_prefill_tokens = _prefill_sizes(config, device, context_length)
    mem_fraction = cache.mem_fraction_static or _mem_fraction(device, chunk, execution.tp_size)
    tokens = cache.max_total_tokens
    if tokens is None and on_cpu:
        heads = max(model.num_kv_heads, execution.tp_size)
        token_bytes = 2 * model.num_layers * heads * model.head_dim * _ITEMSIZE[kv_dtype]
        budget = min(2 * _GIB, int(mem_fraction * (device.memory_bytes or 4 * _GIB)))
        whole = num_slots * (context_length + cache.page_size)
        tokens = max(min(whole, budget // token_bytes), cache.page_size)
    return Resolved(
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_length=context_length,
        page_size=cache.page_size,
        num_slots=num_slots,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max_prefill_tokens,
        mixed=not scheduler.disable_mixed_chunk,
        policy=scheduler.schedule_policy,
        radix=not cache.disable_radix_cache,
        overlap_depth=0 if scheduler.disable_overlap_schedule else 1,
        tp_size=execution.tp_size,
        attention_backend=execution.attention_backend,
        max_total_tokens=tokens and tokens // cache.page_size * cache.page_size,
        mem_fraction_static=mem_fraction,
        recompile_guard=execution.recompile_guard,
        schedule_conservativeness=scheduler.schedule_conservativeness,
        max_queued_requests=scheduler.max_queued_requests,
    )


def _conflicts(
    config: Config, model: ModelConfig, device: DeviceFacts, dtype: str, context: int
) -> list[str]:
    """What cannot work together, in words; it is refused, never switched off silently."""
    cache, policy = config.cache, config.scheduler.schedule_policy
    backend, tp_size = config.execution.attention_backend, config.execution.tp_size
    page_size, tokens, platform = cache.page_size, cache.max_total_tokens, device.platform
    wanted = _BACKEND_PLATFORM.get(backend or "", platform)
    problems = {
        f"--context-length {context} is over the {model.max_position} positions of "
        f"--model-path {config.model.model_path}": context > model.max_position,
        f"--page-size {page_size} is over --context-length {context}": page_size > context,
        f"--max-total-tokens {tokens} holds no page of --page-size {page_size}": (
            tokens is not None and tokens < page_size
        ),
        f"--schedule-policy {policy} orders by cached prefix, but --disable-radix-cache is set": (
            cache.disable_radix_cache and policy in ("lpm", "dfs-weight")
        ),
        "--kv-cache-dtype float32 gains nothing over --dtype bfloat16": (
            cache.kv_cache_dtype == "float32" and dtype == "bfloat16"
        ),
        f"--attention-backend {backend} needs a {wanted}, but --device is {platform}": (
            wanted != platform
        ),
        f"--tp-size {tp_size} is over the {device.count} found of --device {platform}": (
            tp_size > device.count
        ),
    }
    return [message for message, broken in problems.items() if broken]


def _prefill_sizes(config: Config, device: DeviceFacts, context_length: int) -> tuple[int, int]:
    """(chunk, max_prefill_tokens). An automatic size yields to a given one; two given must agree.

    Automatic chunk: 256 on CPU; by memory in GiB: < 20: 2048, < 60: 4096, < 160: 8192, else 16384.
    """
    asked, limit = config.scheduler.chunked_prefill_size, config.scheduler.max_prefill_tokens
    if asked == 0:
        raise ConfigError("--chunked-prefill-size must be -1 (whole prompts) or >= 1, got 0")
    if asked is None:
        gib = (device.memory_bytes or 20 * _GIB) / _GIB
        asked = 2048 if gib < 20 else 4096 if gib < 60 else 8192 if gib < 160 else 16384
        asked = min(256 if device.platform == "cpu" else asked, limit)
    elif asked > limit and limit != SchedulerOptions().max_prefill_tokens:
        raise ConfigError(f"--chunked-prefill-size {asked} is over --max-prefill-tokens {limit}")
    size = context_length if asked == -1 else min(asked, context_length)
    chunk = -(-size // config.cache.page_size) * config.cache.page_size
    return chunk, max(limit, chunk)


def _mem_fraction(device: DeviceFacts, chunk: int, tp_size: int) -> float:
    """What is left beside SGLang's reserve: 512 MB + 1.5 MB a chunk token + 128 MB a tp rank,
    at least 10 GiB of a device over 60 GiB."""
    if device.platform == "cpu":
        return 0.3
    if device.memory_bytes is None:
        return 0.85
    reserved = (512 + 1.5 * max(chunk, 2048) + 128 * tp_size) * (1 << 20)
    if device.memory_bytes > 60 * _GIB:
        reserved = max(reserved, 10 * _GIB)
    return max(0.1, round(1 - reserved / device.memory_bytes, 3))


def _options() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section, field) of every option."""
    for name, section in _SECTIONS.items():
        for option in dataclasses.fields(section):
            yield name, option


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _types(option: dataclasses.Field[Any]) -> list[type]:
    """The types a value may have; option.type is text such as `int | None`."""
    known = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}
    return [known[name.strip()] for name in str(option.type).split("|")]


def _check_value(option: dataclasses.Field[Any], value: Any) -> None:
    """Type, choices and range of one value; an int will do for a float."""
    types, flag = _types(option), _flag(option.name)
    if type(value) not in types and not (float in types and type(value) is int):
        raise ConfigError(f"{flag} must be {option.type}, got {value!r}")
    if value is None:
        return
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value}")
    if low is not None and not low <= value <= (math.inf if high is None else high):
        wanted = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{flag} must be {wanted}, got {value}")


def _add_argument(group: Any, option: dataclasses.Field[Any]) -> None:
    names = [name for name in (_flag(option.name), option.metadata["also"]) if name]
    about, choices, kind = option.metadata["about"], option.metadata["choices"], _types(option)[0]
    keep = {"dest": option.name, "default": argparse.SUPPRESS}
    if kind is bool:
        group.add_argument(*names, action="store_true", help=about, **keep)
        return
    if option.default not in (None, ""):
        about = f"{about} [{option.default}]"
    if choices:
        about = f"{' | '.join(choices)} ({about})"
    group.add_argument(*names, type=kind, metavar=kind.__name__.upper(), help=about, **keep)
