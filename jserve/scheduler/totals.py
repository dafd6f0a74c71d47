"""What the scheduler counts, under the contract's metric names: since its start, or of those who
wait now. No logic.
"""

from __future__ import annotations

TOTALS = (
    *("num_requests_total", "num_aborted_requests_total", "prompt_tokens_total"),
    *("cached_tokens_total", "uncached_tokens_total"),  # at first admissions
    *("generation_tokens_total", "prefill_tokens_total"),
    *("num_prefill_chunks_total", "num_chunked_requests_total", "num_retracted_requests_total"),
    *("num_retracted_input_tokens_total", "num_retracted_output_tokens_total"),
    *("num_preempted_requests_total", "num_waiting_timeouts_total", "num_running_timeouts_total"),
    *("num_waiting_tokens", "num_retracted_reqs"),  # of the queue: it may be too long to count
    *("integrity_failures_total", "num_jump_forward_tokens_total", "grammar_rows_masked_total"),
)
