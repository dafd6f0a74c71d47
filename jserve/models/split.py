"""Over how many devices a model can be split: what must divide, in words, with the sizes that work.

Heads need not divide, head_layout.py pads them; nor need the vocabulary. What experts alone need is
models/moe.py's to refuse. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jserve.errors import ConfigError
from jserve.types import ModelConfig


def check_split(config: ModelConfig, tp: int, ep: int, dp: int = 1) -> None:
    """Raises ConfigError that names what stands against tp · ep devices, and the sizes that do.
    `dp`: of attention, whose ranks have a dp-th of the devices each.
    """
    problem = next(_problems(config, tp * ep, dp), None)
    if problem is None:
        return
    up_to = range(1, config.num_heads * dp + 1)
    asked, sizes = f"--tp-size {tp}", [n for n in up_to if _works(config, n, ep, dp)]
    works = f"--tp-size {_listed(sizes)}"
    if dp > 1:
        asked, works = f"{asked} with --dp-size {dp}", f"{works} with this --dp-size"
    if ep > 1:
        sizes = [n for n in up_to if _works(config, tp, n, dp)]
        asked = f"{asked} with --ep-size {ep}"
        works = f"{works} with this --ep-size, --ep-size {_listed(sizes)} with this --tp-size"
    raise ConfigError(f"{asked} does not fit {problem}; what does: {works}")


def _works(config: ModelConfig, tp: int, ep: int, dp: int) -> bool:
    moe = config.moe
    experts = ep == 1 if moe is None else moe.num_experts % ep == moe.width % tp == 0
    divides = tp % dp == 0 or (tp == 1 and ep % dp == 0)
    return experts and divides and not any(_problems(config, tp * ep, dp))


def _problems(config: ModelConfig, devices: int, dp: int) -> Iterator[str]:
    if devices > config.num_heads * dp:
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
