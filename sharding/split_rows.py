"""A matrix whose rows devices have in parts: rows looked up, and others multiplied with all of it.

Each device does its part. Left to the compiler, what concerns a single row can become a copy of the
whole matrix to every device, as it did on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.rules import Rules


def split_lookup(matrix: jax.Array, ids: jax.Array, axis: str, rules: Rules) -> jax.Array:
    """[T, C] on every device: matrix[ids] of [V, C], whose rows are split over the logical `axis`,
    and int32 [T] in [0, V)."""
    whole, names = rules.spec(()), rules.mapping[axis]
    assert names is not None, f"{axis=} is not split"
    look_up = functools.partial(_look_up, names=names)
    return rules.on_devices(look_up, (rules.spec((axis, None)), whole), whole)(matrix, ids)


def split_product(
    product: Callable[..., jax.Array],
    x: jax.Array,
    matrix: jax.Array,
    split: str,
    *,
    rules: Rules,
    **how: Any,
) -> jax.Array:
    """[N, V], split over the logical axis `split`: `product` (linear.contract, which gets `rules`
    and `how`) of x [N, C] and a matrix [V, C], whose rows are split over it too."""
    run = functools.partial(product, rules=rules, **how)
    specs = (rules.spec(()), rules.spec((split, None)))
    return rules.on_devices(run, specs, rules.spec((None, split)))(x, matrix)


def _look_up(part: jax.Array, ids: jax.Array, *, names: str | tuple[str, ...]) -> jax.Array:
    own = ids - lax.axis_index(names) * len(part)
    rows = jnp.take(part, own, axis=0, mode="clip")
    mine = (own >= 0) & (own < len(part))
    return lax.psum(jnp.where(mine[:, None], rows, 0), names)
