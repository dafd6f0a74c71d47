"""The options: names, defaults, help, choices and ranges, one section a dataclass.

Names are SGLang's where it has the option. Refuses to know how an option is carried out, and which
go together: resolve.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jserve.errors import ConfigError


def _option(
    default: Any,
    about: str,
    choices: str = "",
    low: Any = None,
    high: Any = None,
    also: str = "",
    form: tuple[str, str] = ("", ""),
) -> Any:
    """A field with its help, choices (blanks between), range [low, high], second flag, and the form
    of a text: a regex, and what it asks for in words."""
    metadata = {"about": about, "choices": choices.split(), "low": low, "high": high, "also": also}
    return dataclasses.field(default=default, metadata={**metadata, "form": form})


#: How Prometheus begins the name of a metric.
_METRIC = (r"[a-zA-Z_:][a-zA-Z0-9_:]*", "letters, digits, _ and :, with no digit in front")
_TEXT = (r"\S(.*\S)?", "a text without blanks around it")
_ADDRESS = (r"\S+", "an address, without blanks")
_NOT_EMPTY = (r"(?s).*\S.*", "a file or a Jinja text")
#: Seconds: what waits takes no more (poll counts milliseconds in 32 bits).
_LONGEST = 1_000_000
_MOST_DEVICES = 4096  # along one axis
_MOST_TOKENS = 2_000_000_000  # pages are counted in 32 bits
_MOST = 2**63 - 1  # of any integer: what a message holds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """model: weights, tokenizer, number format"""

    model_path: str = _option(
        "", "directory, hub id, .gguf, Orbax, configs/*.json, or smollm2-135m", also="--model"
    )
    tokenizer_path: str | None = _option(None, "directory or hub id [the model's]", form=_TEXT)
    revision: str | None = _option(None, "branch, tag or commit on the hub", form=_TEXT)
    load_format: str = _option(
        "auto", "dummy is random weights", choices="auto safetensors gguf orbax dummy"
    )
    dtype: str = _option(
        "auto", "the checkpoint's, float32 on CPU", choices="auto float32 bfloat16"
    )
    context_length: int | None = _option(None, "longest prompt + output [the model's]", low=2)
    served_model_name: str | None = _option(None, "name in the API [model-path]", form=_TEXT)
    chat_template: str | None = _option(None, "Jinja file or text [the model's]", form=_NOT_EMPTY)
    random_seed: int | None = _option(None, "seed of unseeded requests [random]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """server: address, key, streaming, logs"""

    host: str = _option("127.0.0.1", "address to listen on", form=_TEXT)
    port: int = _option(30000, "port to listen on", low=0, high=65535)
    api_key: str | None = _option(None, "bearer key that clients must send", form=_TEXT)
    stream_interval: int = _option(1, "tokens in a streamed chunk", low=1)
    enable_metrics: bool = _option(False, "Prometheus metrics at /metrics")
    metrics_prefix: str = _option("jserve", "before the colon of every metric's name", form=_METRIC)
    enable_cache_report: bool = _option(False, "cached_tokens in usage")
    log_requests: bool = _option(False, "log every request")
    log_level: str = _option("info", "least level", choices="debug info warning error critical")
    log_requests_level: int = _option(2, "0: facts, … 3: whole texts", low=0, high=3)
    decode_log_interval: int = _option(40, "decode steps between two log lines", low=1)
    watchdog_timeout: float = _option(300.0, "seconds that one step may take", low=1, high=_LONGEST)
    soft_watchdog_timeout: float | None = _option(
        None, "seconds until stacks are logged", low=0.1, high=_LONGEST
    )
    kv_events_config: str | None = _option(None, "JSON: publisher, endpoint … of cache events")
    reasoning_parser: str | None = _option(
        None,
        "how the model marks its thinking, which is told from its answer",
        choices="deepseek-r1 deepseek-v3 qwen3 qwen3-thinking",
    )
    enable_trace: bool = _option(False, "OpenTelemetry traces of requests")
    otlp_traces_endpoint: str = _option("localhost:4317", "where traces are sent", form=_ADDRESS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """cache: the paged KV pool and the radix cache over it"""

    mem_fraction_static: float | None = _option(
        None, "memory share of weights and KV [by device]", low=0.01, high=0.99
    )
    max_total_tokens: int | None = _option(
        None, "tokens in the KV pool [by memory]", low=1, high=_MOST_TOKENS
    )
    page_size: int | None = _option(
        None, "tokens in a page [16; on TPU more, if page tables need it]", low=1, high=1024
    )
    kv_cache_dtype: str = _option(
        "auto",
        "stored keys and values [as dtype]",
        choices="auto float32 bfloat16 fp8_e4m3 fp8_e5m2",
    )
    disable_radix_cache: bool = _option(False, "reuse no prefixes")
    radix_eviction_policy: str = _option(
        "lru", "which prefixes go first", choices="lru lfu slru priority fifo"
    )
    radix_eviction_policy_config: str | None = _option(
        None, 'JSON, e.g. {"protected_threshold": 2}'
    )
    swa_full_tokens_ratio: float | None = _option(
        None, "sliding-window pool's tokens per token of the full one [by model]", low=0.001, high=1
    )
    disable_hybrid_swa_memory: bool = _option(False, "sliding-window layers keep every token")


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
    prefill_max_requests: int | None = _option(None, "prompts in a step [any]", low=1)
    disable_mixed_chunk: bool = _option(False, "no decode rows beside prompt chunks")
    mixed_chunk_size: int | None = _option(
        None,
        "tokens of a step with decode rows and prompts [64 on CPU, else 512; fewer beside few "
        "rows, more while many prompts wait]",
        low=1,
    )
    schedule_policy: str = _option(
        "fcfs", "order of the queue", choices="fcfs lpm random lof dfs-weight"
    )
    schedule_conservativeness: float = _option(
        1.0, "higher: admit fewer, retract fewer", low=0, high=1000
    )
    enable_priority_scheduling: bool = _option(
        False, "requests' priorities order the queue [cache eviction by priority uses them only]"
    )
    schedule_low_priority_values_first: bool = _option(False, "lower values go first")
    default_priority_value: int | None = _option(None, "of requests without one [the worst]")
    abort_on_priority_when_disabled: bool = _option(
        False, "400 for a priority without --enable-priority-scheduling"
    )
    disable_priority_preemption: bool = _option(False, "never interrupt a lower priority")
    priority_scheduling_preemption_threshold: int = _option(
        10, "least priority difference for an interruption", low=0
    )
    retraction_policy: str = _option(
        "length", "who gives way when pages run out", choices="length priority"
    )
    req_waiting_timeout: float | None = _option(
        None, "seconds in the queue before 503", low=0.001, high=_LONGEST
    )
    req_running_timeout: float | None = _option(
        None, "seconds running before 503", low=0.001, high=_LONGEST
    )
    disable_overlap_schedule: bool = _option(False, "plan a step only after the last one")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """execution: devices, kernels, compilation"""

    device: str = _option("auto", "platform", choices="auto cpu gpu tpu")
    tp_size: int = _option(1, "tensor parallel devices", low=1, high=_MOST_DEVICES, also="--tp")
    dp_size: int = _option(
        1, "engines side by side, each with its devices", low=1, high=_MOST_DEVICES, also="--dp"
    )
    enable_dp_attention: bool = _option(False, "--dp-size ranks of attention in --tp-size")
    ep_size: int = _option(
        1, "times as many, which share the experts", low=1, high=_MOST_DEVICES, also="--ep"
    )
    attention_backend: str | None = _option(
        None,
        "[the first that fits]",
        choices="reference xla mosaic_gpu pallas_triton jax_triton mosaic_tpu",
    )
    recompile_guard: str = _option("warn", "on a compilation after ready", choices="off warn error")
    compilation_cache_dir: str = _option(
        "~/.cache/jserve/compile", "compiled programs; off: none", form=_TEXT
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """grammar: answers that follow a schema, a regex or a grammar"""

    grammar_backend: str | None = _option(
        None, "[xgrammar where installed, else llguidance]", choices="xgrammar llguidance none"
    )
    grammar_compile_timeout: float = _option(
        30.0, "seconds for one grammar", low=0.1, high=_LONGEST
    )
    grammar_compile_memory_mb: int = _option(2048, "memory for one grammar", low=64, high=1 << 30)
    grammar_jump_forward: bool = _option(False, "append the text that a grammar forces at once")
    grammar_workers: int | None = _option(
        None, "long grammars compiled at a time [two a processor, 4 to 16]", low=1, high=256
    )


SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelOptions,
    "server": ServerOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "grammar": GrammarOptions,
    "execution": ExecutionOptions,
}


def all_options() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section, field) of every option."""
    for name, section in SECTIONS.items():
        for option in dataclasses.fields(section):
            yield name, option


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def negated(name: str) -> str:
    """The switch that `no_…` switches off on the command line, "" for any other name."""
    switches = [option.name for _, option in all_options() if types_of(option)[0] is bool]
    return next((switch for switch in switches if name == f"no_{switch}"), "")


def types_of(option: dataclasses.Field[Any]) -> list[type]:
    """The types a value may have; option.type is text such as `int | None`."""
    known = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}
    return [known[name.strip()] for name in str(option.type).split("|")]


def check_value(option: dataclasses.Field[Any], value: Any) -> None:
    """Type, choices and range of one value; an int will do for a float."""
    types, flag = types_of(option), flag_of(option.name)
    if type(value) not in types and not (float in types and type(value) is int):
        raise ConfigError(f"{flag} must be {option.type}, got {value!r}")
    if value is None:
        return
    names = ("choices", "low", "high", "form")
    choices, low, high, (form, words) = (option.metadata[key] for key in names)
    if form and not re.fullmatch(form, str(value)):
        raise ConfigError(f"{flag} must be {words}, got {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value}")
    if type(value) is int and abs(value) > _MOST:
        low, high = -_MOST if low is None else low, _MOST if high is None else high
        got = value if value.bit_length() < 1000 else "one of hundreds of digits"
        raise ConfigError(f"{flag} must be in [{low}, {high}], got {got}")
    if low is not None and not low <= value <= (math.inf if high is None else high):
        wanted = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{flag} must be {wanted}, got {value}")
