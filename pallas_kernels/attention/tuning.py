"""Block sizes of the kernels by device kind: reads block_sizes.json, decides nothing else."""

from __future__ import annotations

import functools
import json
from importlib import resources
from types import MappingProxyType
from typing import Any

import jax


@functools.cache
def _tables() -> MappingProxyType[str, Any]:
    text = resources.files("pallas_kernels.attention").joinpath("block_sizes.json").read_text()
    return MappingProxyType(json.loads(text))


def block_sizes(kernel: str, **limits: int) -> dict[str, int]:
    """The first entry of the kernel's table for this device whose bounds hold.

    Args:
        kernel: a key of block_sizes.json.
        limits: facts of the call; entry field `max_x` bounds fact x, null is no bound.

    A device kind without a table, and a kind that is not there yet (compiling ahead of time), use
    "default".
    """
    tables = _tables()[kernel]
    entries = tables.get(jax.devices()[0].device_kind, tables["default"])
    for entry in entries:
        bounds = ((limits[k[4:]], v) for k, v in entry.items() if k.startswith("max_"))
        if all(bound is None or fact <= bound for fact, bound in bounds):
            return {k: v for k, v in entry.items() if not k.startswith("max_")}
    raise ValueError(f"no block sizes for {kernel} with {limits}")
