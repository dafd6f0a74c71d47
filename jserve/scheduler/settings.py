"""The numbers that a scheduler is built with. Where they come from is config.py's business."""

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
    policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    max_queued: int | None = None
    lookahead: int = 1  # launches that may be in flight when the next plan is made
    seed: int = 0
