"""Random weights for --load-format dummy, made on the devices where they will live; the host never
holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jserve.weights.spec import WeightSpec
from sharding.rules import Rules


def random_params(
    specs: Sequence[WeightSpec], rules: Rules, seed: int, progress: Callable[[int, int], None]
) -> dict[str, jax.Array]:
    """One array per spec; the same values for the same seed whatever the mesh."""
    make = functools.cache(_compiled)  # one program for all layers' equal parameters
    key = jax.random.key(seed)
    params = {}
    for index, spec in enumerate(specs):
        program = make(
            spec.shape, spec.dtype, spec.init_scale, spec.init_value, rules.sharding(spec.axes)
        )
        params[spec.path] = program(jax.random.fold_in(key, index))
        progress(index + 1, len(specs))
    return params


def _compiled(
    shape: tuple[int, ...], dtype: str, scale: float, value: float | None, sharding: Sharding
) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if value is not None:
            return jnp.full(shape, value, dtype)
        return jax.random.normal(key, shape, jnp.dtype(dtype)) * jnp.asarray(scale, dtype)

    return jax.jit(make, out_shardings=sharding)
