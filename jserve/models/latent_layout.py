"""Where the checkpoint's heads and columns go in the projections of latent attention (see
layers/latent_attention.py for their shapes).

Query heads are dealt to the shards; zero heads are appended until the shares are even. Rotated
columns that the checkpoint pairs as neighbours are stored as halves, which queries and keys
agree on: their products are the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jserve.types import LatentConfig


@dataclasses.dataclass(frozen=True, slots=True)
class LatentLayout:
    """`num_slots` counts the appended heads too. Every `place` writes the whole of its target, or
    its own columns of a fused one; tensors are out first, as the checkpoint has them.
    """

    latent: LatentConfig
    num_heads: int
    num_slots: int

    @classmethod
    def of(cls, latent: LatentConfig, num_heads: int, shards: int) -> LatentLayout:
        return cls(latent, num_heads, -(-num_heads // shards) * shards)

    @property
    def query_dim(self) -> int:
        """Of one head."""
        return self.latent.nope_dim + self.latent.rope_dim

    def place_query_down(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """[q_rank, ...] into the first columns of [..., q_rank + kv_rank + rope_dim]."""
        target[..., : len(tensor)] = tensor.T

    def place_latent_down(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """[kv_rank + rope_dim, ...] into the last columns of the same."""
        target[..., -len(tensor) :] = tensor[self._columns(self.latent.kv_rank)].T

    def place_query(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """[H · (nope_dim + rope_dim), I] into [I, H' · (nope_dim + rope_dim)]."""
        assert target.flags.c_contiguous, "a reshaped view is written"
        columns = self._columns(self.latent.nope_dim)
        heads = tensor.reshape(self.num_heads, self.query_dim, -1)[:, columns]
        slots = target.reshape(-1, self.num_slots, self.query_dim)
        slots[:, : self.num_heads] = heads.transpose(2, 0, 1)
        slots[:, self.num_heads :] = 0

    def place_keys(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """The keys' part of [H · (nope_dim + value_dim), kv_rank] into [H', nope_dim, kv_rank]."""
        target[: self.num_heads] = self._up(tensor)[:, : self.latent.nope_dim]
        target[self.num_heads :] = 0

    def place_values(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """The values' part of the same into [H', kv_rank, value_dim]."""
        values = self._up(tensor)[:, self.latent.nope_dim :]
        target[: self.num_heads] = values.transpose(0, 2, 1)
        target[self.num_heads :] = 0

    def place_output(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """[C, H · value_dim] into [H' · value_dim, C]."""
        used = tensor.shape[1]
        target[:used] = tensor.T
        target[used:] = 0

    def _up(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.num_heads, -1, self.latent.kv_rank)

    def _columns(self, before: int) -> np.ndarray:
        """Which of the checkpoint's columns stands where, in `before` plain and rope_dim rotated
        ones."""
        rope = np.arange(self.latent.rope_dim)
        if self.latent.interleaved:
            rope = np.concatenate([rope[0::2], rope[1::2]])
        return np.concatenate([np.arange(before), before + rope])
