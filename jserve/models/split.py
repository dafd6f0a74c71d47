"""Over how many devices a model can be split: what must divide, in words, with the sizes that work.

Heads need not divide, head_layout.py pads them; nor need the vocabulary. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jserve.errors import ConfigError
from jserve.types import ModelConfig


def check_split(config: ModelConfig, tp: int, ep: int, dp: int = 1) -> None:
    """Raises ConfigError that names what stands against tp · ep devices, and sizes against which
    nothing does. `dp`: of attention, whose ranks have a dp-th of the devices each.
    """
    problem = next(_problems(config, tp, ep, dp), None)
    if problem is None:
        return
    asked = {"--tp-size": tp, "--ep-size": ep, "--dp-size": dp}
    asked = {flag: size for flag, size in asked.items() if size > 1 or flag == "--tp-size"}
    up_to = range(1, config.num_heads * dp + 1)
    fitting = {
        "--tp-size": [n for n in up_to if _works(config, n, ep, dp)],
        "--ep-size": [n for n in up_to if ep > 1 and _works(config, tp, n, dp)],
    }
    works = [
        " with ".join(
            [f"{flag} {_listed(sizes)}", *(f"this {one}" for one in asked if one != flag)]
        )
        for flag, sizes in fitting.items()
        if sizes
    ]
    told = " with ".join(f"{flag} {size}" for flag, size in asked.items())
    raise ConfigError(f"{told} does not fit {problem}; what does: {'; '.join(works) or 'neither'}")


def _works(config: ModelConfig, tp: int, ep: int, dp: int) -> bool:
    divides = tp % dp == 0 or (tp == 1 and ep % dp == 0)
    sparse = config.moe is not None or ep == 1
    return sparse and divides and not any(_problems(config, tp, ep, dp))


def _problems(config: ModelConfig, tp: int, ep: int, dp: int) -> Iterator[str]:
    moe, devices = config.moe, tp * ep
    if moe is not None and moe.num_experts % ep:
        yield f"the model's {moe.num_experts} experts, which --ep-size {ep} does not divide"
    if moe is not None and moe.width % tp:
        yield f"the model's {moe.width} columns of an expert, which --tp-size {tp} does not divide"
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
    return ", ".join(map(str, sizes))
