"""Programs of one rank as programs of all of them: a leading axis D over the mesh's data axis.

    one rank's   f(parameters, arrays …)     → arrays …
    all ranks'   f(parameters, [D, …] each)  → [D, …] each

Knows which programs take parameters, and nothing of what any of them computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jserve.runner.manifest import Program
from sharding.ranks import AXIS, Ranks
from sharding.rules import Rules

#: Programs whose first argument are parameters, which ranks share.
_WITH_PARAMETERS = ("forward", "head", "score")


def for_ranks(rules: Rules) -> Callable[[Program], Program]:
    """What start-up makes of each program: nothing, where there are no ranks."""
    ranks = rules.ranks
    return (lambda program: program) if ranks is None else (lambda program: ranked(program, ranks))


def ranked(program: Program, ranks: Ranks) -> Program:
    """The same program, on every rank."""
    shared = int(program.key.name in _WITH_PARAMETERS)
    parameters, own = program.arguments[:shared], program.arguments[shared:]

    def on_each(*arguments: Any) -> Any:
        mine = jax.tree.map(lambda x: x[0], arguments[shared:])
        results = program.function(*arguments[:shared], *mine)
        return jax.tree.map(lambda x: x[None], results)

    by_rank = PartitionSpec(AXIS)
    specs = (*jax.tree.map(lambda x: x.sharding.spec, parameters), *(by_rank for _ in own))
    return Program(
        program.key,
        ranks.each(on_each, specs, by_rank),
        (*parameters, *jax.tree.map(lambda x: _stacked(x, ranks.count), own)),
        program.donated,
        jax.tree.map(_sharding, program.out_shardings),
    )


def _stacked(x: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    assert isinstance(x.sharding, NamedSharding), f"{x.sharding=}"
    return jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=_sharding(x.sharding))


def _sharding(one: NamedSharding) -> NamedSharding:
    return NamedSharding(one.mesh, PartitionSpec(AXIS, *one.spec))
