"""Hyper-parameters of attention over compressed keys and values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: a token keeps one latent of `kv_rank` numbers, of which every
    head's key and value are projections, and one key of `rope_dim` numbers that all heads share.

    A query head is `nope_dim` numbers that meet its projected key and `rope_dim` rotated ones.
    """

    kv_rank: int
    query_rank: int | None  # queries are projected through this many; None: straight
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool  # the checkpoint rotates neighbours; else element i with i + rope_dim / 2

    @property
    def cached_dim(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.kv_rank + self.rope_dim
