"""Every metric that jserve knows by name, one line of data each: SGLang's, then its own.

A series is named `family` or `family/value`, the value being that of the family's extra label;
behind it there may be a priority (priority.py). What an engine sends beyond this table is shown
too, with a scheduler's labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jserve.metrics.histogram import Histogram

_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_WHOLE = (*_FIRST, 600, 1200, 1800, 2400)
_PER_TOKEN = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
_QUEUE = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20),
    *range(30, 101, 10),
    *range(200, 1001, 100),
)
_TOKENS = (
    *(100, 300, 500, 700, 1000, 1500),
    *range(2000, 10_001, 1000),
    *range(12_500, 30_001, 2500),
    *(35_000, 40_000, 60_000, 80_000, 100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000),
)
_EVICTION = (*(n / 1000 for n in range(1, 11)), 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1)
_GRAMMAR = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 240)
_STAGE = tuple(0.001 * 1.62**n for n in range(30))
_SPAN = tuple(base * 10.0**power for power in range(-6, 3) for base in (1, 2, 5))  # 1 µs … 500 s
_SHORT = _SPAN[:-6]  # … 5 s
_LENGTHS = tuple(2**n - 1 for n in range(32))  # as cache/counters.py counts them

#: Who observes a metric, and with which labels: a request in the API process, the engine's
#: scheduler, its cache, or the HTTP server.
Source = Literal["request", "scheduler", "cache", "http"]
_STREAMING = ("is_streaming", ("true", "false"))
_NOTHING: tuple[str, tuple[str, ...]] = ("", ())


class Family(NamedTuple):
    """`label`: the name of the extra label, or some with blanks between, and the values that there
    are from the start."""

    source: Source
    about: str
    label: tuple[str, tuple[str, ...]] = _NOTHING
    bounds: Sequence[float] = ()  # of a histogram

    def series(self, name: str) -> Iterable[str]:
        """The names of the series that exist from the start."""
        return [f"{name}/{value}" for value in self.label[1]] if self.label[0] else [name]


#: Names that end in _total are counters, those with bounds histograms, the others gauges.
FAMILIES: Mapping[str, Family] = {
    # requests, as clients see them
    "num_requests_total": Family(
        "request", "Requests that ended, in whichever way; without those refused.", _STREAMING
    ),
    "num_aborted_requests_total": Family(
        "request", "Those of them that were aborted, by a client or by the engine."
    ),
    "prompt_tokens_total": Family("request", "Prompt tokens of ended requests.", _STREAMING),
    "generation_tokens_total": Family("request", "Generated tokens.", _STREAMING),
    "cached_tokens_total": Family(
        "request", "Prompt tokens that the cache held.", ("cache_source", ("device",))
    ),
    "time_to_first_token_seconds": Family(
        "request", "Creation to first token.", _STREAMING, _FIRST
    ),
    "inter_token_latency_seconds": Family(
        "request", "Time between outputs, per token.", _NOTHING, _PER_TOKEN
    ),
    "request_time_per_output_token_seconds": Family(
        "request", "Mean time per token after the first.", _STREAMING, _PER_TOKEN
    ),
    "e2e_request_latency_seconds": Family("request", "Creation to finish.", _STREAMING, _WHOLE),
    "prompt_tokens_histogram": Family("request", "Prompt length.", _NOTHING, _TOKENS),
    "uncached_prompt_tokens_histogram": Family(
        "request", "Prompt tokens computed.", _NOTHING, _TOKENS
    ),
    "generation_tokens_histogram": Family("request", "Output length.", _NOTHING, _TOKENS),
    # grammars, on their way to the engine
    "num_grammar_total": Family("request", "Requests whose answers follow a grammar."),
    "num_grammar_cache_hit_total": Family("request", "Grammars that were compiled already."),
    "num_grammar_timeout_total": Family("request", "Compilations that took too long."),
    "num_grammar_aborted_total": Family("request", "Requests that ended before they had theirs."),
    "num_grammar_queue_reqs": Family("request", "Requests that wait for theirs."),
    "grammar_compilation_time_seconds": Family("request", "One compilation.", _NOTHING, _GRAMMAR),
    # scheduler
    "queue_time_seconds": Family("scheduler", "Arrival to admission.", _NOTHING, _QUEUE),
    "per_stage_req_latency_seconds": Family(
        "scheduler",
        "Stages of a request.",
        ("stage", ("request_process", "prefill_forward", "chunked_prefill")),
        _STAGE,
    ),
    "num_retracted_requests_total": Family("scheduler", "Retractions for want of pages."),
    "num_retracted_input_tokens_total": Family("scheduler", "Prompt tokens of those."),
    "num_retracted_output_tokens_total": Family("scheduler", "Tokens that they had generated."),
    "realtime_tokens_total": Family(
        "scheduler",
        "Tokens as they are processed.",
        ("mode", ("prefill_compute", "prefill_cache", "decode")),
    ),
    "prefill_effective_tokens_total": Family(
        "scheduler", "Prompt tokens by origin, once each.", ("mode", ("input", "device_hit"))
    ),
    "num_running_reqs": Family("scheduler", "Requests on the device."),
    "num_queue_reqs": Family("scheduler", "Requests that wait."),
    "num_retracted_reqs": Family("scheduler", "Requests that wait after a retraction."),
    "num_paused_reqs": Family("scheduler", "Requests held by a pause."),
    "num_used_tokens": Family("scheduler", "KV tokens of live requests."),
    "token_usage": Family("scheduler", "Used share of the KV pool, or of the fuller one."),
    "utilization": Family("scheduler", "The larger of running / most running and token usage."),
    "max_total_num_tokens": Family("scheduler", "Tokens of the KV pool."),
    "full_token_usage": Family("scheduler", "Used share of the pool of layers that see it all."),
    "swa_token_usage": Family("scheduler", "Used share of the sliding-window layers' pool."),
    "max_total_num_tokens_swa": Family("scheduler", "Tokens of the sliding-window pool."),
    "swa_available_tokens": Family("scheduler", "Its free tokens."),
    "swa_evictable_tokens": Family("scheduler", "Its cached tokens that nobody uses."),
    "swa_used_tokens": Family("scheduler", "Its tokens of live requests."),
    "kv_used_tokens": Family("scheduler", "KV tokens of live requests."),
    "kv_available_tokens": Family("scheduler", "Free KV tokens."),
    "kv_evictable_tokens": Family("scheduler", "Cached KV tokens that nobody uses."),
    "gen_throughput": Family("scheduler", "Generated tokens a second."),
    "cache_hit_rate": Family("scheduler", "Cached share of the last admitted prompts."),
    "new_token_ratio": Family("scheduler", "Share of their limits that requests will use."),
    "is_cuda_graph": Family("scheduler", "0: a step is a program that XLA compiled."),
    # cache
    "evicted_tokens_total": Family("cache", "KV tokens evicted."),
    "eviction_duration_seconds": Family("cache", "One eviction.", _NOTHING, _EVICTION),
    # HTTP
    "http_requests_total": Family("http", "Requests that came.", ("endpoint method", ())),
    "http_responses_total": Family(
        "http", "Their answers, at their end.", ("endpoint status_code method", ())
    ),
    "http_requests_active": Family(
        "http", "Requests whose answer has not ended.", ("endpoint method", ())
    ),
    # from here on names are jserve's own: prompt
    "prompt_template_seconds": Family("request", "Messages to text.", _NOTHING, _SHORT),
    "prompt_tokenize_seconds": Family("request", "Text to ids.", _NOTHING, _SHORT),
    # cache
    "cache_match_seconds": Family("cache", "Match and lock of a prefix.", _NOTHING, _SHORT),
    "cache_allocate_seconds": Family("cache", "Pages, evicting for them.", _NOTHING, _SHORT),
    "cache_match_tokens": Family("cache", "Tokens matched.", _NOTHING, _LENGTHS),
    "cache_active_references": Family("cache", "Leases of live requests."),
    "allocator_failures_total": Family("cache", "Times that there were too few pages."),
    # execution
    "execution_queue_seconds": Family("scheduler", "Arrival to admission.", _NOTHING, _QUEUE),
    "execution_plan_seconds": Family("scheduler", "Decide what runs.", _NOTHING, _SHORT),
    "execution_launch_seconds": Family("scheduler", "Dispatch a forward.", _NOTHING, _SHORT),
    "execution_step_seconds": Family(
        "scheduler", "Launch, or the end of the step before, to tokens.", _NOTHING, _SHORT
    ),
    "execution_read_seconds": Family("scheduler", "Wait for tokens.", _NOTHING, _SHORT),
    "execution_commit_seconds": Family("scheduler", "Record tokens.", _NOTHING, _SHORT),
    "num_preempted_requests_total": Family("scheduler", "Gave way to a higher priority."),
    "num_waiting_timeouts_total": Family("scheduler", "Waited for too long."),
    "num_running_timeouts_total": Family("scheduler", "Ran for too long."),
    "recompiles_total": Family("scheduler", "Compilations after ready: each is a fault."),
    "bucket_real_tokens_total": Family(
        "scheduler", "Tokens of steps, before padding.", ("kind", ("decode", "mixed"))
    ),
    "bucket_padded_tokens_total": Family(
        "scheduler", "Tokens of steps, padded.", ("kind", ("decode", "mixed"))
    ),
    "expert_tokens_total": Family(
        "scheduler", "Tokens that a router gave each expert, over all layers.", ("expert", ())
    ),
    "expert_balancedness": Family(
        "scheduler",
        "Mean / most tokens of a layer's experts, over the last minute or two.",
        ("layer", ()),
    ),
    "grammar_rows_masked_total": Family("scheduler", "Draws that a grammar bound."),
    "grammar_failures_total": Family(
        "scheduler",
        "Answers that a grammar could not bring to an end.",
        ("kind", ("token", "nothing", "length", "limit", "fault")),
    ),
    # output
    "output_mask_seconds": Family("scheduler", "Fill grammar masks.", _NOTHING, _SHORT),
    "output_sample_seconds": Family("scheduler", "Dispatch a head.", _NOTHING, _SHORT),
    "output_detokenize_seconds": Family("request", "Ids to text.", _NOTHING, _SHORT),
    "output_stream_seconds": Family("request", "Send one event.", _NOTHING, _SHORT),
    # all four
    "request_boundary_seconds": Family(
        "request",
        "What a request spent; the four sum to its end-to-end latency.",
        ("boundary", ("prompt", "cache", "execution", "output")),
        _SPAN,
    ),
}

#: What else an engine tells of itself: shown once it has.
OTHERS: Mapping[str, str] = {
    "num_dp_ranks": "Data-parallel ranks that serve.",
    "page_size": "Tokens of a page of the KV pool.",
    "num_pages": "Pages of the KV pool.",
    "context_len": "Most tokens of a request, prompt and answer.",
    "kv_protected_tokens": "Cached KV tokens that live requests use.",
    "num_waiting_tokens": "Tokens to compute of requests that wait, cached or not.",
    "num_chunked_tokens": "Tokens left of the prompt that is cut.",
    "num_chunked_requests_total": "Requests whose prompt was cut.",
    "num_prefill_chunks_total": "Pieces of prompts that were computed.",
    "prefill_tokens_total": "Prompt tokens that were computed.",
    "uncached_tokens_total": "Prompt tokens that the cache did not hold.",
    "num_jump_forward_tokens_total": "Tokens that a grammar left no choice of.",
    "integrity_failures_total": "Checks at rest that found pages amiss: each is a fault.",
    "steps_total": "Steps that were committed.",
    "programs_pending": "Programs that are still to be compiled.",
}

#: Series that another one, of the same engine, stands for.
ALIASES: Mapping[str, str] = {
    "realtime_tokens_total/prefill_compute": "prefill_tokens_total",
    "realtime_tokens_total/prefill_cache": "cached_tokens_total",
    "realtime_tokens_total/decode": "generation_tokens_total",
    "prefill_effective_tokens_total/input": "uncached_tokens_total",
    "prefill_effective_tokens_total/device_hit": "cached_tokens_total",
    "execution_queue_seconds": "queue_time_seconds",
}


def histograms(*sources: Source) -> dict[str, Histogram]:
    """Every histogram series that `sources` observe, empty."""
    return {
        series: Histogram(family.bounds)
        for name, family in FAMILIES.items()
        if family.bounds and family.source in sources and name not in ALIASES
        for series in family.series(name)
    }
