"""Over how many devices a model can be split: what must divide, in words, with the sizes that work.

Heads need not divide, head_layout.py pads them; nor need the vocabulary. What experts alone need is
models/moe.py's to refuse. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jserve.errors import ConfigError
from jserve.types import ModelConfig


def check_split(config: ModelConfig, tp: int, ep: int) -> None:
    """Raises ConfigError that names what stands against tp · ep devices, and the sizes that do."""
    problem = next(_problems(config, tp * ep), None)
    if problem is None:
        return
    up_to = range(1, config.num_heads + 1)
    asked, sizes = f"--tp-size {tp}", [n for n in up_to if _works(config, n, ep)]
    works = f"--tp-size {_listed(sizes)}"
    if ep > 1:
        asked, sizes = f"{asked} with --ep-size {ep}", [n for n in up_to if _works(config, tp, n)]
        works = f"{works} with this --ep-size, --ep-size {_listed(sizes)} with this --tp-size"
    raise ConfigError(f"{asked} does not fit {problem}; what does: {works}")


def _works(config: ModelConfig, tp: int, ep: int) -> bool:
    moe = config.moe
    experts = ep == 1 if moe is None else moe.num_experts % ep == moe.width % tp == 0
    return experts and not any(_problems(config, tp * ep))


def _problems(config: ModelConfig, devices: int) -> Iterator[str]:
    if devices > config.num_heads:
        yield f"the model's {config.num_heads} query heads, of which each device needs one"
    for name, width in _widths(config):
        if width % devices:
            yield f"the model's {name} {width}, which {devices} does not divide"


def _widths(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Of the layers that are split over all devices."""
    moe = config.moe
    if moe is None or not all(moe.sparse_layers):
        yield "intermediate size", config.intermediate_size
    if moe is not None:
        yield "shared expert's size", moe.shared_width


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes)) or "(none)"
