"""How a model's heads lie over the tensor axis, and where the checkpoint's heads go in the fused
projection (see layers/attention.py for its columns) and in the one behind it.

Each of S shards stores equally many KV heads, the fewest that hold all: K' = ceil(K / S) · S, and
on TPU more where those make no whole tiles (types/kv_layout.py). From K' = 2 K on, each is stored
K' // K times, and its replicas share out its query heads: G' = ceil(G / replicas) slots each. What
is left over is zeros: KV heads that nobody asks, query heads whose output meets zero rows.

    9 query and 3 KV heads   S    K'   replicas   G'   (query slots of a shard)
                             2    4    1          3    6
                             3    3    1          3    3
                             4    4    1          3    3
                             8    8    2          2    2
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jserve.errors import ConfigError
from jserve.types import ModelConfig
from jserve.types.kv_layout import KVLayout


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLayout:
    """`num_kv_heads` counts the stored ones of all shards, `group` the query slots of each;
    `kv_heads` and `num_heads` are the checkpoint's.
    """

    num_heads: int
    kv_heads: int
    num_kv_heads: int
    replicas: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, shards: int, layout: KVLayout) -> HeadLayout:
        """Raises ConfigError when KV heads have unequal shares of the query heads, or are longer
        than the platform's kernel takes.
        """
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % kv_heads:
            raise ConfigError(
                f"the model's config: {heads} query heads are no multiple of {kv_heads} KV heads"
            )
        if layout.head_dim is not None and config.head_dim > layout.head_dim:
            raise ConfigError(
                f"{config.architecture} has heads of {config.head_dim} numbers, of which the TPU "
                f"kernel takes {layout.head_dim} at most; GPU and CPU serve it"
            )
        stored = layout.heads(kv_heads, shards) * shards
        replicas = stored // kv_heads
        group = -(-(heads // kv_heads) // replicas)
        return cls(heads, kv_heads, stored, replicas, group, config.head_dim)

    @property
    def num_slots(self) -> int:
        """Query heads that are computed, over all shards."""
        return self.num_kv_heads * self.group

    @property
    def fused_width(self) -> int:
        return self.num_kv_heads * (self.group + 2) * self.head_dim

    def place(self, which: str, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write the projection q, k or v [heads · D, ...] (out first) into its slots of the
        interleaved [..., K' · (G' + 2) · D].
        """
        assert target.flags.c_contiguous, "a reshaped view is written"
        outer, group = target.shape[:-1], self.group
        slots = target.reshape(*outer, self.num_kv_heads, group + 2, self.head_dim)
        heads = tensor.T.reshape(*outer, self.kv_heads, -1, self.head_dim)  # [..., K, G or 1, D]
        if which == "q":
            self._deal(slots[..., :group, :], heads, group)
        else:
            member = group + ("k", "v").index(which)
            self._deal(slots[..., member : member + 1, :], heads, 0)

    def place_output(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write the projection behind attention [C, H · D] (out first) into [K' · G' · D, C]."""
        assert target.flags.c_contiguous, "a reshaped view is written"
        slots = target.T.reshape(-1, self.num_kv_heads, self.group, self.head_dim)
        self._deal(slots, tensor.reshape(len(tensor), self.kv_heads, -1, self.head_dim), self.group)

    def place_each(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write what each query head has one number of, [H], into [K' · G']."""
        slots = target.reshape(self.num_kv_heads, self.group, 1)
        self._deal(slots, tensor.reshape(self.kv_heads, -1, 1), self.group)

    def _deal(self, slots: np.ndarray, heads: np.ndarray, stride: int) -> None:
        """[..., K, G, D] into [..., K', G', D]: replica j takes G' of G from j · `stride` on."""
        used = self.kv_heads * self.replicas
        slots[..., used:, :, :] = 0
        for replica in range(self.replicas):
            part = heads[..., replica * stride :, :][..., : slots.shape[-2], :]
            mine = slots[..., replica : used : self.replicas, :, :]
            mine[..., : part.shape[-2], :] = part
            mine[..., part.shape[-2] :, :] = 0
