"""What each row of gpu_perf.py is to reach on one H200, and what vLLM 0.26.0 (FlashAttention 3,
whole CUDA graphs, asynchronous scheduling) was measured at on such a card. Data only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """`figure` of a row is to be at most `bound`, or at least where `higher`."""

    figure: str
    bound: float
    higher: bool = False
    peer: float | None = None

    def judge(self, row: Row) -> Row:
        value, sign = row[self.figure], 1 if self.higher else -1
        met = sign * (value - self.bound) >= 0
        beside = {} if self.peer is None else {"peer": self.peer}
        return {"figure": self.figure, "target": self.bound, "met": met, **beside}


TARGETS = {
    "decode_1": Target("ms", 4.4, peer=5.21),
    "decode_8": Target("ms", 4.7, peer=5.67),
    "decode_32": Target("ms", 5.6, peer=6.64),
    "decode_64": Target("ms", 6.9, peer=8.09),
    "decode_128": Target("ms", 9.9, peer=11.72),
    "decode_256": Target("ms", 15.9, peer=19.42),
    "full_sampler_256": Target("of_greedy", 1.10),
    "decode_64_at_8k": Target("of_roofline", 1.2),
    "decode_1_at_32k": Target("of_roofline", 1.2),
    "prefill_512x1024": Target("tokens_per_s", 47_000, higher=True, peer=42_322),
    "prefill_1x8192": Target("of_matmul_peak", 0.70, higher=True),
    "prefill_16x512": Target("of_matmul_peak", 0.80, higher=True),
    "prefill_4k_on_28k": Target("of_matmul_peak", 0.60, higher=True),
    "offline_512": Target("s", 19.0, peer=22.0),
    "shared_prefix_cold": Target("requests_per_s", 126, higher=True, peer=105),
    "shared_prefix_warm": Target("requests_per_s", 131, higher=True, peer=109),
    "online_8": Target("itl_p99_of_median", 2.0),
    "online_16": Target("itl_p99_of_median", 2.0),
    "online_24": Target("itl_p99_of_median", 2.0),
    "http_256_streams": Target("of_engine", 0.92, higher=True),
    "start_cold": Target("compiled_s", 60, peer=75),
    "start_warm": Target("compiled_s", 12),
    "engine": Target("memory_held", 0.92, higher=True),
}

#: (row, its new figure, its own figure, the row and figure that this is divided by)
_SHARES = (
    ("full_sampler_256", "of_greedy", "ms", "decode_256", "ms"),
    ("online_8", "itl_p99_of_median", "p99_itl_ms", "online_8", "median_itl_ms"),
    ("online_16", "itl_p99_of_median", "p99_itl_ms", "online_16", "median_itl_ms"),
    ("online_24", "itl_p99_of_median", "p99_itl_ms", "online_24", "median_itl_ms"),
    (
        "http_256_streams", "of_engine", "output_throughput",
        "engine_256_streams", "output_tokens_per_s",
    ),
)  # fmt: skip


def compared(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows with what they are to reach, where they have the figure for it."""
    rows = {name: dict(row) for name, row in rows.items()}
    for name, share, figure, other, divisor in _SHARES:
        value, base = rows.get(name, {}).get(figure), rows.get(other, {}).get(divisor)
        if value and base:
            rows[name][share] = round(value / base, 3)
    for name, row in rows.items():
        target = TARGETS.get(name)
        if target is not None and target.figure in row:
            row["goal"] = target.judge(row)
    return rows
