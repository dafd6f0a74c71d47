"""`resolve`: from options, model and devices to the numbers the engine runs with.

Pure: it is handed model and devices as plain records. What cannot work together is refused here,
and what needs neither to be known in together.py.
"""

from __future__ import annotations

import dataclasses

from jserve.config.dp_attention import num_attention_ranks
from jserve.config.kv_events import KvEventsOptions, kv_events_options
from jserve.config.pages import fitting_page_size, page_conflicts
from jserve.config.replica import too_few_devices
from jserve.config.together import check_together, protected_threshold
from jserve.config.tree import Config
from jserve.errors import ConfigError
from jserve.types import ModelConfig
from jserve.types.kv_layout import KV_LAYOUTS

_GIB = 1 << 30
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_FLOAT8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_WITHOUT_E4M3 = ("7.0", "7.2", "7.5", "8.0", "8.6", "8.7")  # compute capabilities
#: Where an attention implementation runs; the others run everywhere.
_BACKEND_PLATFORMS = {
    **dict.fromkeys(("mosaic_gpu", "pallas_triton", "jax_triton"), ("gpu",)),
    "mosaic_tpu": ("tpu",),
    "xla": ("cpu", "gpu"),  # reads no pool that lies as TPU kernels want it
}


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`platform` is cpu, gpu or tpu; `count` is of all that there are, for every engine together;
    `memory_bytes` is one device's, or the free RAM on CPU; `capability` a GPU's compute capability.
    """

    platform: str
    kind: str
    count: int
    memory_bytes: int | None
    capability: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The numbers the engine runs with; nothing is automatic but the pool's size on a device.

    `chunked_prefill_size` is a multiple of page_size; it holds the whole context when chunking is
    off. `mixed_chunk_size`, the bound beside decode rows, is at most that, and so is
    `mixed_chunk_most`, to which an automatic one grows while many prompts wait; 0 keeps a given one
    as it is. `attn_dp_size`: ranks of --enable-dp-attention, each with slots, chunks and pages of
    these sizes. `max_total_tokens` is a multiple of page_size, or None: as much as
    `mem_fraction_static` leaves once the steps are compiled. `hybrid_swa`: layers with a window
    have a pool of their own, in which they keep little more than the window; None as
    `swa_full_tokens_ratio` is for runner/window_share.py to decide.
    """

    dtype: str
    kv_dtype: str
    context_length: int
    page_size: int
    num_slots: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    mixed: bool
    mixed_chunk_size: int
    mixed_chunk_most: int
    policy: str
    radix: bool
    eviction: str
    protected_threshold: int
    kv_events: KvEventsOptions | None
    overlap_depth: int
    tp_size: int
    attn_dp_size: int
    ep_size: int
    attention_backend: str | None
    max_total_tokens: int | None
    mem_fraction_static: float
    recompile_guard: str
    schedule_conservativeness: float
    max_queued_requests: int | None
    hybrid_swa: bool
    swa_full_tokens_ratio: float | None


def resolve(config: Config, model: ModelConfig, device: DeviceFacts) -> Resolved:
    """Every number from options, model and devices. Pure. Raises ConfigError naming both flags."""
    cache, scheduler, execution = config.cache, config.scheduler, config.execution
    on_cpu = device.platform == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu or model.dtype == "float32" else "bfloat16"
    kv_dtype = cache.kv_cache_dtype if cache.kv_cache_dtype != "auto" else dtype
    kv_dtype = _FLOAT8.get(kv_dtype, kv_dtype)
    context_length = config.model.context_length or model.max_position
    check_together(config)
    num_slots = 32 if on_cpu else 256
    if scheduler.max_running_requests is not None:  # of all data-parallel ranks
        num_slots = scheduler.max_running_requests // execution.dp_size
    page_size = fitting_page_size(config, device.platform, num_slots, context_length)
    for problem in _conflicts(config, model, device, dtype, context_length, page_size):
        raise ConfigError(problem)
    if problem := too_few_devices(execution, device.count, device.platform):
        raise ConfigError(problem)
    for problem in _float8_conflicts(config, model, device):
        raise ConfigError(problem)
    num_devices, ranks = execution.tp_size * execution.ep_size, num_attention_ranks(execution)
    chunk, max_prefill_tokens = _prefill_sizes(config, device, context_length, page_size)
    mem_fraction = cache.mem_fraction_static or _mem_fraction(device, chunk, num_devices)
    tokens = cache.max_total_tokens
    if tokens is None and on_cpu:
        token_bytes = _token_numbers(model, num_devices // ranks) * _ITEMSIZE[kv_dtype]
        budget = min(2 * _GIB, int(mem_fraction * (device.memory_bytes or 4 * _GIB))) // ranks
        whole = num_slots * (context_length + page_size)
        tokens = max(min(whole, budget // token_bytes), page_size)
    return Resolved(
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_length=context_length,
        page_size=page_size,
        num_slots=num_slots,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max_prefill_tokens,
        mixed=not scheduler.disable_mixed_chunk,
        mixed_chunk_size=min(scheduler.mixed_chunk_size or (64 if on_cpu else 512), chunk),
        mixed_chunk_most=chunk if scheduler.mixed_chunk_size is None else 0,
        policy=scheduler.schedule_policy,
        radix=not cache.disable_radix_cache,
        eviction=cache.radix_eviction_policy,
        protected_threshold=protected_threshold(cache),
        kv_events=kv_events_options(config.server.kv_events_config, config.replica.rank),
        overlap_depth=0 if scheduler.disable_overlap_schedule else 1,
        tp_size=execution.tp_size,
        attn_dp_size=ranks,
        ep_size=execution.ep_size,
        attention_backend=execution.attention_backend,
        max_total_tokens=tokens and tokens // page_size * page_size,
        mem_fraction_static=mem_fraction,
        recompile_guard=execution.recompile_guard,
        schedule_conservativeness=scheduler.schedule_conservativeness,
        max_queued_requests=scheduler.max_queued_requests,
        hybrid_swa=_hybrid(config, model, context_length),
        swa_full_tokens_ratio=cache.swa_full_tokens_ratio,
    )


def _token_numbers(model: ModelConfig, tp_size: int) -> int:
    """How many a cached token takes in all layers; devices of a CPU share its memory."""
    if model.latent is not None:
        return model.num_layers * model.latent.cached_dim * tp_size
    stored = KV_LAYOUTS["cpu"].heads(model.num_kv_heads, tp_size) * tp_size
    return 2 * model.num_layers * stored * model.head_dim


def _hybrid(config: Config, model: ModelConfig, context: int) -> bool:
    """Whether some layer has a window that a context can outgrow, and may forget what it left."""
    windows = [window for window in model.windows if window is not None]
    return not config.cache.disable_hybrid_swa_memory and bool(windows) and max(windows) < context


def _conflicts(
    config: Config,
    model: ModelConfig,
    device: DeviceFacts,
    dtype: str,
    context: int,
    page_size: int,
) -> list[str]:
    """What cannot work together, in words; it is refused, never switched off silently."""
    cache, execution, platform = config.cache, config.execution, device.platform
    backend, tp_size, ep_size = execution.attention_backend, execution.tp_size, execution.ep_size
    wanted = _BACKEND_PLATFORMS.get(backend or "", (platform,))
    problems = {
        f"--context-length {context} is over the {model.max_position} positions of "
        f"--model-path {config.model.model_path}": context > model.max_position,
        f"--page-size {page_size} is over --context-length {context}": page_size > context,
        **page_conflicts(cache.max_total_tokens, page_size),
        "--kv-cache-dtype float32 gains nothing over --dtype bfloat16": (
            cache.kv_cache_dtype == "float32" and dtype == "bfloat16"
        ),
        f"--swa-full-tokens-ratio {cache.swa_full_tokens_ratio} sizes the pool of sliding-window "
        f"layers, but --disable-hybrid-swa-memory is set, or no window of --model-path "
        f"{config.model.model_path} is under --context-length {context}": (
            cache.swa_full_tokens_ratio is not None and not _hybrid(config, model, context)
        ),
        f"--attention-backend {backend} needs a {' or '.join(wanted)}, but --device is "
        f"{platform}": platform not in wanted,
        f"--tp-size {tp_size} is over the {device.count} found of --device {platform}": (
            tp_size > device.count
        ),
        f"--tp-size {tp_size} times --ep-size {ep_size} is over the {device.count} found of "
        f"--device {platform}; --ep-size {device.count // tp_size} is the most": (
            tp_size * ep_size > device.count
        ),
    }
    return [message for message, broken in problems.items() if broken]


def _float8_conflicts(config: Config, model: ModelConfig, device: DeviceFacts) -> list[str]:
    """What float8 keys and values cannot be combined with, in words."""
    kind, execution = config.cache.kv_cache_dtype, config.execution
    if kind not in _FLOAT8:
        return []
    layout, ranks = KV_LAYOUTS[device.platform], num_attention_ranks(execution)
    heads = layout.heads(model.num_kv_heads, execution.tp_size * execution.ep_size // ranks)
    problems = {
        f"--kv-cache-dtype {kind} is not for --attention-backend mosaic_gpu, which reads bfloat16; "
        "leave the backend out: pallas_triton serves it": (
            config.execution.attention_backend == "mosaic_gpu"
        ),
        f"--kv-cache-dtype {kind} needs a GPU of compute capability 8.9 or more, not the "
        f"{device.capability} of {device.kind}; fp8_e5m2 does not": (
            kind == "fp8_e4m3" and device.capability in _WITHOUT_E4M3
        ),
        f"--kv-cache-dtype {kind} on TPUs takes 2, 4, 8 or 16 KV heads on each, or a multiple of "
        f"16, but --tp-size {execution.tp_size} and --ep-size {execution.ep_size} leave {heads} of "
        f"--model-path {config.model.model_path}": not layout.takes_float8(heads),
        f"--kv-cache-dtype {kind} is not for --model-path {config.model.model_path}, which keeps a "
        "latent of each token: leave it at auto": model.latent is not None,
    }
    return [message for message, broken in problems.items() if broken]


def _prefill_sizes(
    config: Config, device: DeviceFacts, context_length: int, page_size: int
) -> tuple[int, int]:
    """(chunk, max_prefill_tokens). An automatic size yields to a given one; two given must agree.

    Automatic chunk: 256 on CPU; by memory in GiB: < 20: 2048, < 60: 4096, < 160: 8192, else 16384.
    """
    asked, limit = config.scheduler.chunked_prefill_size, config.scheduler.max_prefill_tokens
    if asked is None:
        gib = (device.memory_bytes or 20 * _GIB) / _GIB
        asked = 2048 if gib < 20 else 4096 if gib < 60 else 8192 if gib < 160 else 16384
        asked = min(256 if device.platform == "cpu" else asked, limit)
        asked = max(1, asked // num_attention_ranks(config.execution))  # the wide layers get all
    size = context_length if asked == -1 else min(asked, context_length)
    chunk = -(-size // page_size) * page_size
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
