"""How a model's heads lie over the tensor axis, and where the checkpoint's heads go in the fused
projection (see layers/attention.py for its columns).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jserve.errors import ConfigError
from jserve.types import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLayout:
    """`num_kv_heads` counts replicas: every shard holds at least one."""

    num_heads: int
    num_kv_heads: int
    replicas: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, shards: int) -> HeadLayout:
        """Raises ConfigError when the heads cannot be dealt evenly to `shards`."""
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % shards or (kv_heads % shards and shards % kv_heads) or heads % kv_heads:
            raise ConfigError(
                f"the model's {heads} query heads and {kv_heads} KV heads do not divide over "
                f"--tp-size {shards}; it must divide {heads}, and divide {kv_heads} or be a "
                "multiple of it"
            )
        replicas = max(1, shards // kv_heads)
        return cls(heads, kv_heads * replicas, replicas, config.head_dim)

    @property
    def group(self) -> int:
        """Query heads of one stored KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def fused_width(self) -> int:
        return self.num_kv_heads * (self.group + 2) * self.head_dim

    def place(self, which: str, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write the projection q, k or v [heads · D, ...] (out first) into its slots of the
        interleaved [..., K · (G + 2) · D].
        """
        assert target.flags.c_contiguous, "a reshaped view is written"
        outer, group = target.shape[:-1], self.group
        slots = target.reshape(*outer, self.num_kv_heads, group + 2, self.head_dim)
        if which == "q":
            slots[..., :group, :] = tensor.T.reshape(*outer, -1, group, self.head_dim)
            return
        heads = tensor.T.reshape(*outer, -1, self.head_dim)
        slots[..., group + ("k", "v").index(which), :] = np.repeat(heads, self.replicas, axis=-2)
