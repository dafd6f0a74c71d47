"""Matrix products as they are asked for on each platform."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.layers.linear import contract


@pytest.mark.parametrize(
    ("platform", "rows", "columns", "axis", "multiplied"),
    [
        ("gpu", 1, 32, 0, 8), ("gpu", 1, 32, 1, 8), ("gpu", 1, 1 << 20, 0, 1),
        ("gpu", 1, 1 << 20, 1, 8), ("gpu", 2, 32, 0, 2), ("cpu", 1, 32, 0, 1),
    ],
)  # fmt: skip
def test_a_gpu_multiplies_one_row_of_a_small_or_transposed_matrix_beside_spare_ones(
    platform: str, rows: int, columns: int, axis: int, multiplied: int
) -> None:
    rules: Any = SimpleNamespace(platform=platform, mesh=SimpleNamespace(size=1))
    shape = (16, columns) if axis == 0 else (columns, 16)
    types = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
    product = functools.partial(contract, rules=rules, axis=axis, out_dtype=jnp.dtype("float32"))
    traced = jax.make_jaxpr(product)(*types)
    (dot,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general")
    assert dot.outvars[0].aval.shape == (multiplied, columns)
    assert traced.out_avals[0].shape == (rows, columns)
