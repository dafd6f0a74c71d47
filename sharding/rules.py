"""Logical axis → mesh axis: models name what an axis is, a preset says where it lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.ranks import Ranks

#: Axes a weight or an activation may name. `None` in a tuple of axes: replicated.
LOGICAL_AXES = ("vocab", "heads", "kv_heads", "mlp", "expert", "expert_mlp")

Mapped = str | tuple[str, ...] | None  # onto one mesh axis, several, the first outermost, or none
#: Tensor parallelism; axes that are not named are replicated.
TP: Mapping[str, Mapped] = {
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "expert_mlp"), "tensor"),
    "expert": "expert",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """One mesh and one mapping of logical axes onto it; passed on, never global."""

    mesh: Mesh
    mapping: Mapping[str, Mapped]
    ranks: Ranks | None = None  # of a program that is mapped over data

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Of an array whose dimensions are named `axes`; raises KeyError on an unknown axis."""
        for axis in set(axes).difference(LOGICAL_AXES, (None,)):
            raise KeyError(f"unknown logical axis {axis!r}; known: {LOGICAL_AXES}")
        return PartitionSpec(*(None if a is None else self.mapping.get(a) for a in axes))

    def sharding(self, axes: Sequence[str | None] = ()) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Inside jit: pin the layout of `x`, so that the compiler puts the collective here."""
        pin = self.ranks.constrain if self.ranks else jax.lax.with_sharding_constraint
        return pin(x, self.sharding(axes))

    def on_devices(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Inside jit: `run` on each device, which sees its shards and nothing of the mesh."""
        split = self.ranks.shard_map if self.ranks else jax.shard_map
        specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        return split(run, mesh=self.mesh, **specs)

    def size(self, axis: str) -> int:
        """How many ways the logical axis is split."""
        return self.mesh.size // self.sharding((axis,)).shard_shape((self.mesh.size,))[0]

    @property
    def platform(self) -> str:
        """What programs over this mesh are compiled for: cpu, gpu or tpu, present or described."""
        return self.mesh.devices.flat[0].platform
