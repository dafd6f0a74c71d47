"""--enable-dp-attention: what --dp-size means with it, and what it cannot be combined with.

The devices of --tp-size times --ep-size are then --dp-size ranks of one program: each attends with
its share of them, feed-forward layers are split over all. Ranks take devices along --tp-size, and
split experts' widths, or along --ep-size where that is all there is, and have experts of their own.
Without the flag, --dp-size is of engines side by side.
"""

from __future__ import annotations

from jserve.config.options import ExecutionOptions


def num_attention_ranks(execution: ExecutionOptions) -> int:
    """How many ranks attention is dealt out to within one engine."""
    return execution.dp_size if execution.enable_dp_attention else 1


def attention_conflicts(execution: ExecutionOptions) -> dict[str, bool]:
    """What is wrong with it in words, and whether it is. What the model stands against is
    models/split.py's."""
    if not execution.enable_dp_attention:
        return {}
    dp_size, along = execution.dp_size, "--tp-size" if execution.tp_size > 1 else "--ep-size"
    devices = execution.tp_size if execution.tp_size > 1 else execution.ep_size
    fitting = ", ".join(str(n) for n in range(2, devices + 1) if devices % n == 0)
    needed = "it needs a --tp-size and --dp-size from 2 on"
    hint = f"--dp-size {fitting} divides {along} {devices}" if fitting else needed
    return {
        f"--enable-dp-attention deals out attention to --dp-size ranks, which is 1; {hint}": dp_size
        == 1,
        f"--enable-dp-attention deals out {along} {devices} devices to --dp-size {dp_size} ranks, "
        f"which does not divide them; {hint}": devices % dp_size > 0,
    }
