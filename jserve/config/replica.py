"""Which of the engines behind one front an engine is. No option: engine/ranks.py tells each."""

from __future__ import annotations

import dataclasses

from jserve.config.options import ExecutionOptions


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """`rank` is in [0, num_replicas); `alone`: in a process of its own, with a backend of its own.
    Otherwise the devices of the process are dealt out."""

    rank: int = 0
    alone: bool = True


def num_replicas(execution: ExecutionOptions) -> int:
    """How many engines there are, each with --tp-size times --ep-size devices."""
    return 1 if execution.enable_dp_attention else execution.dp_size


def too_few_devices(execution: ExecutionOptions, found: int, platform: str) -> str:
    """What is wrong when the engines need more than the `found` devices, or ""."""
    replicas, each = num_replicas(execution), execution.tp_size * execution.ep_size
    if replicas == 1 or replicas * each <= found:
        return ""
    most = found // each
    hint = f"--dp-size {most} is the most" if most else "not even one has room"
    sizes = {"--tp-size": execution.tp_size, "--ep-size": execution.ep_size}
    others = "".join(f" times {flag} {size}" for flag, size in sizes.items() if size > 1)
    return (
        f"--dp-size {replicas}{others} takes {replicas * each} devices, over the {found} found of "
        f"--device {platform}; {hint}"
    )
