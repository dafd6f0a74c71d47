"""Checkpoint → parameters on their devices, streaming.

Tensors are read in the order in which they lie in the files, each once, and only those that a
device of this host has a part of. A parameter exists on the host from its first piece to its last,
as assembly.py has it; then it goes to its devices and the host copy is dropped. Peak host memory
beyond the parameters that already live there (on CPU the devices are the host) is one tensor and
the parameters whose pieces are still missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jserve.errors import WeightError
from jserve.weights.assembly import Assembly, assembly_of
from jserve.weights.checkpoint import Checkpoint, TensorSource
from jserve.weights.dummy import random_params
from jserve.weights.leftovers import check_left
from jserve.weights.orbax import OrbaxSource
from jserve.weights.spec import Piece, WeightSpec
from sharding.rules import Rules

_MAX_TRANSFERS = 2  # uploads that may be pending, each with its host copy


def load_params(
    specs: Sequence[WeightSpec],
    checkpoint: Checkpoint,
    rules: Rules,
    dtype: str,
    *,
    progress: Callable[[int, int], None],
    seed: int = 0,
) -> dict[str, jax.Array]:
    """One array per spec, keyed by its path, sharded by `rules`, converted from the file's dtype to
    the spec's.

    `dtype` holds for specs that leave theirs empty. `progress(done, total)` counts parameters.
    Tensors that no spec asks for are ignored, but those without which the others are wrong. Raises
    WeightError naming file and tensor: missing, of the wrong shape, truncated, in need of another.
    """
    if checkpoint.kind == "dummy":
        return random_params(specs, rules, seed, progress)
    source = OrbaxSource(checkpoint.path) if checkpoint.kind == "orbax" else checkpoint.tensors()
    return stream_params(specs, source, rules, dtype, progress=progress)


def stream_params(
    specs: Sequence[WeightSpec],
    source: TensorSource,
    rules: Rules,
    dtype: str,
    *,
    progress: Callable[[int, int], None],
) -> dict[str, jax.Array]:
    """The streaming half of load_params, over any source."""
    asked = uses_of(specs, source)
    hosts = {index: _assembly(spec, dtype, rules) for index, spec in enumerate(specs)}
    missing = [sum(map(hosts[i].wants, spec.pieces)) for i, spec in enumerate(specs)]
    uses = {
        name: [(index, piece) for index, piece in users if hosts[index].wants(piece)]
        for name, users in asked.items()
    }
    wanted = {name: users for name, users in uses.items() if users}
    params: dict[str, jax.Array] = {}
    pending: deque[jax.Array] = deque()
    for name in source.names():
        if name not in wanted:
            continue
        tensor = source.read(name)
        for index, piece in wanted[name]:
            hosts[index].add(piece, tensor)
            missing[index] -= 1
            if missing[index] == 0:
                params[specs[index].path] = _upload(hosts.pop(index), specs[index], rules, pending)
                progress(len(params), len(specs))
        del tensor
    jax.block_until_ready(list(pending))
    assert not hosts, f"parameters without all their pieces: {[specs[i].path for i in hosts]}"
    return {spec.path: params[spec.path] for spec in specs}


def uses_of(
    specs: Sequence[WeightSpec], source: TensorSource
) -> dict[str, list[tuple[int, Piece]]]:
    """Tensor name → the (spec, piece) it fills. Checks names and shapes of all, and what no spec
    asks for, before anything is read; raises WeightError.
    """
    uses: dict[str, list[tuple[int, Piece]]] = {}
    names = source.names()
    for index, spec in enumerate(specs):
        assert spec.pieces, f"{spec.path} is made of nothing"
        for piece in spec.pieces:
            uses.setdefault(piece.name, []).append((index, piece))
    absent = [name for name in uses if name not in names]
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        where = ", ".join(str(file) for file in source.files[:3]) or "the checkpoint"
        raise WeightError(f"{where}: tensor {absent[0]} is missing{more}")
    for name, users in uses.items():
        for _, piece in users:
            found = source.shape(name)
            if found != piece.shape:
                raise WeightError(
                    f"{source.file(name)}: tensor {name} has shape {found}, "
                    f"the model needs {piece.shape}"
                )
    if left := [name for name in names if name not in uses]:
        check_left(left, uses, source.file)
    return uses


def _assembly(spec: WeightSpec, dtype: str, rules: Rules) -> Assembly:
    indices = rules.sharding(spec.axes).addressable_devices_indices_map(spec.shape).values()
    kept = np.dtype(jax.numpy.dtype(spec.dtype or dtype))
    return assembly_of(spec, kept, [index for index in indices if index is not None])


def _upload(host: Assembly, spec: WeightSpec, rules: Rules, pending: deque[jax.Array]) -> jax.Array:
    """To its devices. `host` must not be written again: on CPU the array may share its memory."""
    sharding = rules.sharding(spec.axes)
    array = jax.make_array_from_callback(
        spec.shape, sharding, lambda index: host.shard(index or ())
    )
    pending.append(array)
    if len(pending) > _MAX_TRANSFERS:
        jax.block_until_ready(pending.popleft())
    return array
