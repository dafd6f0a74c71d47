"""Over how many devices a model can be split: what must divide, in words, with the sizes that work.

Heads need not divide, head_layout.py pads them; nor need the vocabulary. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jserve.errors import ConfigError
from jserve.types import ModelConfig

_Sizes = Mapping[str, int]  # of --tp-size, --ep-size and --dp-size, in this order


def check_split(config: ModelConfig, tp: int, ep: int, dp: int = 1) -> None:
    """Raises ConfigError that names what stands against tp · ep devices, and sizes against which
    nothing does. `dp`: of attention, whose ranks have a dp-th of the devices each.
    """
    problem = next(_problems(config, tp, ep, dp), None)
    if problem is None:
        return
    asked = {"--tp-size": tp, "--ep-size": ep, "--dp-size": dp}
    given = _given(asked)
    others = {flag: _others(config, asked, flag) for flag in given}
    works = [
        " with ".join(
            [f"{flag} {_listed(sizes)}", *(f"this {one}" for one in given if one != flag)]
        )
        for flag, sizes in others.items()
        if sizes
    ]
    most = max((_devices({**asked, f: n}) for f, sizes in others.items() for n in sizes), default=0)
    works += [_told(sizes) for sizes in _together(config, asked) if _devices(sizes) > most]
    known = "; ".join(works) or "nothing with --enable-dp-attention"
    raise ConfigError(f"{_told(asked)} does not fit {problem}; what does: {known}")


def _others(config: ModelConfig, asked: _Sizes, flag: str) -> list[int]:
    """What works in place of this size."""
    least = 2 if flag == "--dp-size" else 1
    up_to = range(least, max(config.num_heads * asked["--dp-size"], _devices(asked)) + 1)
    return [size for size in up_to if _works(config, {**asked, flag: size})]


def _together(config: ModelConfig, asked: _Sizes) -> Sequence[_Sizes]:
    """What works on the most devices, no more than were asked for."""
    ranks = range(2, _devices(asked) + 1) if asked["--dp-size"] > 1 else (1,)
    for devices in range(_devices(asked), 0, -1):
        pairs = [(tp, devices // tp) for tp in range(1, devices + 1) if devices % tp == 0]
        tries = [dict(zip(asked, (*pair, dp), strict=True)) for pair in pairs for dp in ranks]
        if found := [sizes for sizes in tries if _works(config, sizes)]:
            return found
    return []


def _works(config: ModelConfig, sizes: _Sizes) -> bool:
    tp, ep, dp = sizes.values()
    divides = tp % dp == 0 or (tp == 1 and ep % dp == 0)
    return divides and not any(_problems(config, tp, ep, dp))


def _devices(sizes: _Sizes) -> int:
    return sizes["--tp-size"] * sizes["--ep-size"]


def _told(sizes: _Sizes) -> str:
    return " with ".join(f"{flag} {sizes[flag]}" for flag in _given(sizes))


def _given(sizes: _Sizes) -> list[str]:
    return [flag for flag, size in sizes.items() if size > 1 or flag == "--tp-size"]


def _problems(config: ModelConfig, tp: int, ep: int, dp: int) -> Iterator[str]:
    moe, devices = config.moe, tp * ep
    if moe is None and ep > 1:
        yield f"a model without experts, which --ep-size {ep} deals out"
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
