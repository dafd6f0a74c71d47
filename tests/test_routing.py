"""The steps between a router and its experts, each implementation against numpy."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routing import sort_by_expert, take_rows, top_k

IMPLEMENTATIONS = ("xla", "pallas_triton_interpret")
EXPERTS = 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 2), (5, 3), (300, 8), (900, 8), (1707, 3)])
def test_assignments_are_sorted_by_expert_and_found_again(
    implementation: str, num_tokens: int, count: int
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, EXPERTS + 1, (num_tokens, count)).astype(np.int32)
    found = sort_by_expert(jnp.asarray(ids), EXPERTS, implementation=implementation)
    tokens, places, sizes = map(np.asarray, found)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(tokens, order // count)
    np.testing.assert_array_equal(places.reshape(-1)[order], np.arange(ids.size))
    np.testing.assert_array_equal(sizes, np.bincount(ids.reshape(-1), minlength=EXPERTS + 1)[:-1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_best_of_each_row_come_first_and_equal_ones_in_order(implementation: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-3, 4, (20, 16)).astype(np.float32)  # with many ties
    x[3, 2:] = -np.inf  # as groups that are not chosen
    values, ids = top_k(jnp.asarray(x), 5, implementation=implementation)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_are_taken_as_often_as_they_are_named(implementation: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((50, 512)).astype(np.float32)
    rows = rng.integers(0, 50, 4096).astype(np.int32)
    taken = jax.jit(lambda x, r: take_rows(x, r, implementation=implementation))(x, rows)
    np.testing.assert_array_equal(taken, x[rows])


def test_what_the_kernels_cannot_do_is_done_by_xla() -> None:
    odd, many = jnp.zeros((2, 60)), jnp.zeros((70000, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="60 columns"):
        top_k(odd, 2, implementation="pallas_triton")
    with pytest.raises(NotImplementedError, match="70000 assignments"):
        sort_by_expert(many, EXPERTS, implementation="pallas_triton")
    assert top_k(odd, 2, platform="gpu")[1].tolist() == [[0, 1]] * 2
    assert sort_by_expert(many, EXPERTS, platform="gpu").sizes.tolist() == [70000, *[0] * 7]


def card() -> contextlib.AbstractContextManager[Any]:
    """What jax 0.12 wants to know to lower for a GPU without one."""
    if jax.version.__version_info__ < (0, 12):
        return contextlib.nullcontext()
    device: Any = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    )


@pytest.mark.parametrize(("tokens", "kernels"), [(4, 2), (512, 2), (513, 4), (8192, 4)])
def test_on_a_gpu_each_is_one_kernel_and_a_sort_of_many_three(tokens: int, kernels: int) -> None:
    def both(x: jax.Array) -> object:
        return sort_by_expert(top_k(x, 8, platform="gpu")[1], 128, platform="gpu")

    x = jax.ShapeDtypeStruct((tokens, 128), jnp.float32)
    with card():
        lowered = jax.jit(both).trace(x).lower(lowering_platforms=("cuda",))
    found = re.findall(r"custom_call @|stablehlo\.sort|chlo\.top_k", lowered.as_text())
    assert found == ["custom_call @"] * kernels
