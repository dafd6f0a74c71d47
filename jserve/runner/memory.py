"""What fills one device: weights, slot state, temporaries, and the KV pool that gets the rest."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jserve.runner.window_share import WindowShare

# The pool is a multiple of 1/64 of the device: its size is part of every compilation cache key.
_GRAINS = 64
_RESERVE = 0.02  # of the device, for what no analysis shows


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device of the mesh. `limit` None: the device does not tell; on a CPU, its part
    of the RAM."""

    limit: int | None
    weights: int
    state: int
    page: int  # one page of all layers, this device's heads
    temporaries: int = 0  # of the largest step, outputs included
    shares: tuple[WindowShare, ...] = ()  # of the cache groups, whose layers `page` leaves out

    def pool(self, num_pages: int) -> int:
        """Bytes of a pool of that many pages, with those of its groups."""
        groups = sum(share.pages(num_pages) * share.page_bytes for share in self.shares)
        return num_pages * self.page + groups

    def num_pages(self, fraction: float) -> int:
        """Pages of a pool that with the weights fits `fraction`, and leaves room for a step."""
        assert self.limit is not None
        room = min(fraction * self.limit - self.weights - self.state, self._beside_a_step())
        grain = self.limit // _GRAINS
        return self._pages_in(int(room) // grain * grain)

    def most_pages(self) -> int:
        """Pages of the largest pool that leaves room for a step."""
        return self._pages_in(self._beside_a_step())

    def _pages_in(self, room: float) -> int:
        return bisect.bisect_right(range(1, 1 << 40), room, key=self.pool)

    def _beside_a_step(self) -> float:
        assert self.limit is not None
        return (1 - _RESERVE) * self.limit - self.temporaries - self.weights - self.state

    def table(self, num_pages: int, page_size: int) -> str:
        tokens = (num_pages - 1) * page_size
        rows = [
            ("weights", self.weights),
            (f"KV pool: {tokens} tokens in {num_pages - 1} pages", num_pages * self.page),
            *(
                (f"sliding-window pool: {pages - 1} pages", pages * share.page_bytes)
                for share in self.shares
                for pages in [share.pages(num_pages)]
            ),
            ("slot state", self.state),
            ("step temporaries", self.temporaries),
        ]
        if self.limit is not None:
            rows.append(("free", self.limit - sum(size for _, size in rows)))
            rows.append(("device", self.limit))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / 2**30:8.3f} GiB" for name, size in rows)


def device_limit(device: Any) -> int | None:
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def local_bytes(arrays: Iterable[Any]) -> int:
    """Bytes that arrays, or their ShapeDtypeStructs with shardings, take on each device."""
    total = 0
    for array in arrays:
        size = array.dtype.itemsize
        for dimension in array.sharding.shard_shape(array.shape):
            size *= dimension
        total += size
    return total


def temporary_bytes(program: jax.stages.Compiled, platform: str) -> int:
    """What a call needs beside its arguments: scratch and the outputs that alias none of them. On
    TPU scratch alone leaves out most of what is live at the peak.
    """
    analysis: Any = program.memory_analysis()
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    beside = analysis.temp_size_in_bytes + max(0, outputs)
    if platform != "tpu":
        return beside
    return max(beside, analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes)
