"""Data-parallel ranks inside one program: each attends to its own tokens, wide layers are shared.

The mesh's data axis is mapped by hand: a rank's code is that of a program of its own, over the axes
that are left, which the compiler splits. Only `gather` and `scatter` reach the other ranks: a
feed-forward layer, split over all devices, gets everybody's tokens, and gives each rank its own
back, summed.

Knows no layer and no program. Legend: D ranks, T tokens of one rank, as many on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def over_ranks(base: Mapping[str, Any], experts: str = "expert_mlp") -> dict[str, Any]:
    """A preset, as sharding/rules.py has them, for ranks that are each split as `base` says:
    feed-forward layers are split over them too. `experts`: the axis that the ranks split of those,
    their width, or "expert": each rank has its own.
    """
    return {**base, **{axis: (AXIS, *_names(base[axis])) for axis in ("mlp", experts)}}


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Those along the data axis of `mesh`. All but `each` and `alone` is for use inside these."""

    mesh: Mesh

    @property
    def count(self) -> int:
        return self.mesh.shape[AXIS]

    @property
    def _mapped(self) -> frozenset[str]:
        """Axes of one device are mapped too: without others left, the compiler splits nothing."""
        return frozenset(
            axis for axis, size in self.mesh.shape.items() if axis == AXIS or size == 1
        )

    @property
    def _left(self) -> frozenset[str]:
        return frozenset(self.mesh.axis_names) - self._mapped

    def each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`function` on every rank, of its shares of what is split over ranks by specs of the whole
        mesh.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self._mapped),
            in_specs=_only(in_specs, self._mapped),
            out_specs=_only(out_specs, self._mapped),
            check_vma=False,
        )

    def alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on every rank, each of all that is given; for the shapes of its results."""
        return self.each(function, PartitionSpec(), PartitionSpec())

    def shard_map(
        self,
        function: Callable[..., Any],
        *,
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        check_vma: bool,
    ) -> Callable[..., Any]:
        """As jax.shard_map, over the devices of a rank; where that is one, `function` itself."""
        assert mesh == self.mesh, f"{mesh=} {self.mesh=}"
        if not self._left:
            return function
        return jax.shard_map(  # inside another one the mesh is its own
            function,
            axis_names=set(self._left),
            in_specs=_only(in_specs, self._left),
            out_specs=_only(out_specs, self._left),
            check_vma=check_vma,
        )

    def constrain(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """As jax.lax.with_sharding_constraint, among the devices of a rank."""
        spec = _only(sharding.spec, self._left)
        return lax.with_sharding_constraint(x, spec) if self._left else x

    def gather(self, x: jax.Array) -> jax.Array:
        """[T, …] of this rank → [D · T, …] of all, in their order."""
        return lax.all_gather(x, AXIS, tiled=True)

    def scatter(self, x: jax.Array) -> jax.Array:
        """[D · T, …], of which each rank has a part of the sum → [T, …], the sum of this rank's.

        On CPU in float32: XLA aborts on a narrower sum of ranks that have several devices each.
        """
        wide = jnp.float32 if self.mesh.devices.flat[0].platform == "cpu" else x.dtype
        return lax.psum_scatter(x.astype(wide), AXIS, tiled=True).astype(x.dtype)

    def own(self, x: jax.Array) -> jax.Array:
        """[D · T, …] that every rank has → [T, …], this rank's."""
        num_tokens = x.shape[0] // self.count
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * num_tokens, num_tokens)

    def once(self, x: jax.Array) -> jax.Array:
        """What is added to a part of a sum: zeros but on the first rank."""
        return jnp.where(lax.axis_index(AXIS) == 0, x, jnp.zeros_like(x))


def _only(specs: Any, axes: frozenset[str]) -> Any:
    """PartitionSpecs, in a tree, without what they say of other axes."""

    def keep(spec: PartitionSpec) -> PartitionSpec:
        kept = [tuple(axis for axis in _names(names) if axis in axes) for names in spec]
        return PartitionSpec(*(names or None for names in kept))

    return jax.tree.map(keep, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())
