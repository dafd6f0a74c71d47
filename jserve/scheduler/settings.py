"""The numbers that a scheduler is built with. Where they come from is config's business."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Plain numbers. Token counts unless the name says otherwise."""

    num_slots: int
    context_length: int
    page_size: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    mixed: bool = True  # prompt chunks share a step with decode rows
    mixed_chunk_size: int = 512  # such a step's budget for both, a page of prompt at least
    mixed_chunk_most: int = 0  # what that grows to while many prompts wait; 0: it stays as it is
    policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    max_queued: int | None = None
    prefill_max_requests: int | None = None  # prompts in a step
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    default_priority_value: int | None = None  # None: a request without one comes last
    abort_on_priority_when_disabled: bool = False
    disable_priority_preemption: bool = False
    priority_scheduling_preemption_threshold: int = 10
    retraction_policy: str = "length"
    req_waiting_timeout: float | None = None  # seconds
    req_running_timeout: float | None = None  # seconds
    lookahead: int = 1  # launches that may be in flight when the next plan is made
    seed: int = 0
