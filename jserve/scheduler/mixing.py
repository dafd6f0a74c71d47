"""How large a step with decode rows and prompts may be: who waits for the next token against who
waits for the first. Numbers only.

An automatic size bounds what a prompt costs the decode rows, about the time of one more step: half
of it beside few rows, whose steps are short. When many wait behind the prompt, that bound would
keep the batch small, and all of them waiting: then a step is twice as large; and when they are not
far from as many as the decode rows, prompts get a share of the largest step, by the numbers of
both, rounded up to the size of a bucket, because what a bucket pads costs as much.
"""

from __future__ import annotations

from jserve.scheduler.settings import SchedulerSettings

_FEW = 8  # times the decode rows are fewer than the step's tokens
_MANY, _MOST = 4, 2  # times those who wait are at least the decode rows


def mixed_size(settings: SchedulerSettings, num_decode: int, behind: int) -> int:
    """Tokens of a step with `num_decode` > 0 decode rows, a page of prompt at least; `behind`
    requests wait behind its first prompt. At most the chunk."""
    size, most = settings.mixed_chunk_size, settings.mixed_chunk_most
    if most and _FEW * num_decode < size:
        size //= 2
    if most and _MANY * behind >= num_decode:
        size *= 2
    if most and _MOST * behind >= num_decode:
        share = most * behind // (behind + num_decode)
        size = max(size, 1 << (share - 1).bit_length())
    return min(settings.chunked_prefill_size, max(size, num_decode + settings.page_size))
