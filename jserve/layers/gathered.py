"""A feed-forward layer that data-parallel ranks share: split over all their devices, it is given
the tokens of all, and each rank gets the sums of its own. What it computes is not known here.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jserve.batch import CallContext
from sharding.ranks import Ranks


class Gathered(nnx.Module):
    """`inner`: [D · T, C] → [D · T, C], on each rank a part of the sum over ranks."""

    def __init__(self, inner: nnx.Module, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks

    def __call__(self, x: jax.Array, context: CallContext) -> jax.Array:  # [T, C], this rank's
        with jax.named_scope("gather"):
            everybody = self.ranks.gather(x)
        y = self.inner(everybody, context)
        with jax.named_scope("scatter"):
            return self.ranks.scatter(y)


class AddedOnce(nnx.Module):
    """A parameter as a layer reads it, `p[...]`: zeros on all ranks but one, because what it is
    added to is a part of a sum."""

    def __init__(self, parameter: nnx.Param, ranks: Ranks) -> None:
        self.parameter, self.ranks = parameter, ranks

    def __getitem__(self, index: Any) -> jax.Array:
        return self.ranks.once(self.parameter[index])
