"""Options that cannot work together, whatever the model and the devices: known before anything is
loaded. What depends on those is resolve.py's.
"""

from __future__ import annotations

from jserve.config.dp_attention import attention_conflicts
from jserve.config.json_object import read_object
from jserve.config.kv_events import check_apart, kv_events_options
from jserve.config.options import CacheOptions, SchedulerOptions
from jserve.config.pages import least_page_size, page_conflicts
from jserve.config.tree import Config
from jserve.errors import ConfigError


def check_together(config: Config) -> None:
    """Raises ConfigError naming the flags; nothing is switched off silently."""
    conflicts = {
        **_cache_conflicts(config.cache, config.scheduler.schedule_policy),
        **_size_conflicts(config.scheduler),
        **_rank_conflicts(config.scheduler.max_running_requests, config.execution.dp_size),
        **attention_conflicts(config.execution),
        **_priority_conflicts(config.scheduler),
    }
    for message, broken in conflicts.items():
        if broken:
            raise ConfigError(message)
    protected_threshold(config.cache)
    events = kv_events_options(config.server.kv_events_config)
    check_apart(config.server.kv_events_config, config.execution.dp_size)
    if events is not None and config.cache.disable_radix_cache:
        raise ConfigError(
            "--kv-events-config tells of the radix cache, but --disable-radix-cache is set"
        )


def protected_threshold(cache: CacheOptions) -> int:
    """Of slru, which is the one policy that takes a number."""
    flag, text = "--radix-eviction-policy-config", cache.radix_eviction_policy_config
    if text is not None and cache.radix_eviction_policy != "slru":
        raise ConfigError(
            f"{flag} {text} is for --radix-eviction-policy slru, not {cache.radix_eviction_policy}"
        )
    return read_object(flag, text, {"protected_threshold": 2})["protected_threshold"]


def _cache_conflicts(cache: CacheOptions, policy: str) -> dict[str, bool]:
    eviction = cache.radix_eviction_policy
    return {
        **page_conflicts(cache.max_total_tokens, least_page_size(cache)),
        f"--schedule-policy {policy} orders by cached prefix, but --disable-radix-cache is set": (
            cache.disable_radix_cache and policy in ("lpm", "dfs-weight")
        ),
        f"--radix-eviction-policy {eviction} orders the radix cache, but --disable-radix-cache "
        "is set": cache.disable_radix_cache and eviction != "lru",
    }


def _size_conflicts(scheduler: SchedulerOptions) -> dict[str, bool]:
    asked, limit = scheduler.chunked_prefill_size, scheduler.max_prefill_tokens
    mixed_size, usual = scheduler.mixed_chunk_size, SchedulerOptions().max_prefill_tokens
    return {
        "--chunked-prefill-size must be -1 (whole prompts) or >= 1, got 0": asked == 0,
        f"--chunked-prefill-size {asked} is over --max-prefill-tokens {limit}": (
            asked is not None and asked > limit and limit != usual
        ),
        f"--mixed-chunk-size {mixed_size} bounds mixed steps, but --disable-mixed-chunk is set": (
            scheduler.disable_mixed_chunk and mixed_size is not None
        ),
    }


def _rank_conflicts(asked: int | None, dp_size: int) -> dict[str, bool]:
    return {
        f"--max-running-requests {asked} is for all ranks together, and less than one for each of "
        f"--dp-size {dp_size}": asked is not None and asked < dp_size
    }


def _priority_conflicts(scheduler: SchedulerOptions) -> dict[str, bool]:
    """Priorities order arrival and output length; what is about them needs them to be in use."""
    used, policy = scheduler.enable_priority_scheduling, scheduler.schedule_policy
    threshold = scheduler.priority_scheduling_preemption_threshold
    usual = SchedulerOptions().priority_scheduling_preemption_threshold
    wishes = {
        f"--default-priority-value {scheduler.default_priority_value}": (
            scheduler.default_priority_value is not None
        ),
        "--schedule-low-priority-values-first": scheduler.schedule_low_priority_values_first,
        "--disable-priority-preemption": scheduler.disable_priority_preemption,
        f"--priority-scheduling-preemption-threshold {threshold}": threshold != usual,
        "--retraction-policy priority": scheduler.retraction_policy == "priority",
    }
    problems = {
        f"{flag} needs --enable-priority-scheduling": wish and not used
        for flag, wish in wishes.items()
    }
    clash = f"--enable-priority-scheduling goes with --schedule-policy fcfs or lof, not {policy}"
    return problems | {clash: used and policy not in ("fcfs", "lof")}
