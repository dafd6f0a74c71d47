"""The grouped matmul: one suite over every implementation that runs here, against numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params as interpret  # public from jax 0.11 on

from pallas_kernels.gmm import GATES, gated, grouped_matmul, mosaic_gpu, pallas_triton

IMPLEMENTATIONS = ("reference", "xla", "ragged_dot", "pallas_triton_interpret")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `sizes` rows a group, `spare` rows that belong to none, NaN in x."""

    sizes: tuple[int, ...]
    width: int = 64
    out_width: int = 128
    spare: int = 0
    dtype: str = "float32"
    out_dtype: str | None = None


CASES = {
    "one row": Case((0, 1, 0)),
    "one group": Case((37,)),
    "few rows of many groups": Case((0, 1, 0, 0, 2, 1, 0, 3) + (0,) * 12 + (1,), spare=2),
    "uneven groups": Case((40, 0, 3, 17, 90, 0, 1, 16), spare=5),
    "groups as long as tiles": Case((16, 32, 64, 128)),
    "more spare rows than a tile": Case((3, 0, 9), spare=200),
    "nothing but spare rows": Case((0, 0, 0), spare=33),
    "widths that no tile divides": Case((5, 0, 21), width=50, out_width=90, spare=3),
    "widths less than a tile": Case((5, 0, 21), width=8, out_width=4, spare=3),
    "bfloat16": Case((40, 0, 3, 17, 90), dtype="bfloat16", spare=4),
    "bfloat16, float32 out": Case((1, 0, 2, 0), dtype="bfloat16", out_dtype="float32"),
}


def make(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    rows = sum(case.sizes)
    x = rng.standard_normal((rows + case.spare, case.width))
    x[rows:] = np.nan
    weights = rng.standard_normal((len(case.sizes), case.width, case.out_width))
    return (
        jnp.asarray(x, case.dtype),
        jnp.asarray(weights, case.dtype),
        jnp.asarray(case.sizes, jnp.int32),
    )


def brute_force(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> np.ndarray:
    """[M, O] in float64."""
    out = np.zeros((x.shape[0], weights.shape[2]))
    begin = 0
    for matrix, size in zip(np.asarray(weights, np.float64), np.asarray(sizes), strict=True):
        out[begin : begin + size] = np.asarray(x[begin : begin + size], np.float64) @ matrix
        begin += size
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_each_row_meets_its_own_groups_matrix(name: str, implementation: str) -> None:
    case = CASES[name]
    arguments = make(case)
    out = jax.jit(
        lambda *a: grouped_matmul(*a, out_dtype=case.out_dtype, implementation=implementation)
    )(*arguments)
    assert out.dtype == jnp.dtype(case.out_dtype or case.dtype)
    expected = brute_force(*arguments)
    assert not np.any(np.asarray(out, np.float32)[sum(case.sizes) :])
    error = np.linalg.norm(np.asarray(out, np.float64) - expected)
    limit = 1e-5 if case.dtype == "float32" else 4e-3
    assert error <= limit * np.linalg.norm(expected), f"{error=}"


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_takes_the_two_halves_of_each_row(gate: str) -> None:
    x, weights, sizes = make(Case((3, 0, 21), spare=3))
    first, second = jnp.split(weights, 2, axis=2)
    expected = GATES[gate](*(grouped_matmul(x, half, sizes) for half in (first, second)))
    for implementation in IMPLEMENTATIONS:
        how = {"gate": gate, "implementation": implementation}
        out = jax.jit(lambda *a, how=how: grouped_matmul(*a, **how))(x, weights, sizes)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heights", ((16,), (16, 64)))
def test_a_tile_takes_the_least_height_that_holds_it(heights: tuple[int, ...]) -> None:
    tile = pallas_triton.Tile(heights=heights, columns=32, depth=32, warps=4, stages=2)
    x, weights, sizes = make(Case((0, 1, 15, 16, 17, 63, 64, 65, 80), out_width=64, spare=20))
    how = {"out_dtype": jnp.dtype("float32"), "interpret": True, "tile": tile}
    out = jax.jit(lambda *a: pallas_triton.matmul(*a, **how))(x, weights, sizes)
    np.testing.assert_allclose(out, brute_force(x, weights, sizes), atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "groups", "height", "needed"),
    [(8, 128, 16, 8), (1, 1, 16, 1), (512, 128, 16, 152), (64, 3, 16, 7), (2048, 8, 128, 24)],
)
def test_programs_are_as_many_as_the_worst_routing_needs(
    rows: int, groups: int, height: int, needed: int
) -> None:
    assert pallas_triton.num_tiles(rows, groups, height) == needed
    rng = np.random.default_rng(0)
    worst = 0
    for _ in range(50):
        parts = rng.multinomial(rows, rng.dirichlet(np.full(groups + 1, 0.3)))
        worst = max(worst, int(np.sum(-(-parts // height))))
    parts = np.ones(min(rows, groups + 1), int)
    parts[0] += rows - len(parts)  # all that is left in one
    assert worst <= needed == np.sum(-(-parts // height))


def test_few_rows_a_group_get_flat_tiles_and_many_tall_ones() -> None:
    tallest = [pallas_triton.tile_for(rows, 128).rows for rows in (8, 512, 2048, 16384, 65536)]
    assert tallest == sorted(tallest) and tallest[0] == 16 and tallest[-1] >= 128


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_rounded_to_the_rows_type(implementation: str) -> None:
    x, weights, sizes = make(Case((3, 0, 5), dtype="bfloat16"))
    wide = weights.astype(jnp.float32) * (1 + 2**-12)  # no bfloat16 any more
    run = jax.jit(lambda w: grouped_matmul(x, w, sizes, implementation=implementation))
    mixed = run(wide)
    assert mixed.dtype == jnp.bfloat16 and not jnp.array_equal(wide, weights.astype(jnp.float32))
    np.testing.assert_array_equal(mixed.astype(jnp.float32), run(weights).astype(jnp.float32))


@pytest.mark.parametrize("tile", [mosaic_gpu.PLAIN, mosaic_gpu.GATED])
@pytest.mark.parametrize("sizes", [(130, 70, 56), (0, 133, 3, 0, 250, 1, 64, 5, 40), (512, 0)])
def test_hopper_tiles_hold_every_row_once_and_begin_where_the_copy_engine_can(
    sizes: tuple[int, ...], tile: mosaic_gpu.Tile
) -> None:
    num_rows = sum(sizes)  # the last ones are nobody's
    plan = jax.jit(mosaic_gpu._tiles, static_argnums=(1, 2))
    table = np.asarray(plan(jnp.asarray(sizes[:-1], jnp.int32), num_rows, tile.rows))
    tiles = table[: table[-1, 0]]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    held = [(owner, row) for owner, _, begin, end in tiles for row in range(begin, end)]
    assert held == list(zip(owners, range(num_rows), strict=True))
    _, first, begin, end = tiles.T
    assert np.all(first % mosaic_gpu.ALIGN == 0) and np.all(first <= begin)
    assert np.all(end <= first + tile.rows) and np.all(first + tile.rows <= num_rows)


def test_other_chips_leave_hoppers_kernel_to_the_next_implementation() -> None:
    x, weights, sizes = make(Case((128,), dtype="bfloat16"))
    with pytest.raises(NotImplementedError, match="Hopper"):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")


@pytest.mark.full
@pytest.mark.parametrize("gate", (None, "silu"))
@pytest.mark.parametrize(
    ("sizes", "spare", "width", "out_width", "processors"),
    [((130, 70), 56, 128, 256, 2), ((0, 133, 3, 0, 250, 1, 64, 5), 40, 320, 512, 3)],
)
def test_hoppers_kernel_computes_the_same_in_threads_on_cpu(
    sizes: tuple[int, ...],
    spare: int,
    width: int,
    out_width: int,
    processors: int,
    gate: str | None,
) -> None:
    arguments = make(Case(sizes, width, out_width, spare, dtype="bfloat16"))
    how = {"gate": gate, "processors": processors, "share_memory": lambda *refs: refs}
    with interpret.force_gpu_interpret_mode(interpret.InterpretGPUParams()):
        out = jax.jit(lambda *a: mosaic_gpu.run(*a, **how))(*arguments)
    expected = np.asarray(gated(jnp.asarray(brute_force(*arguments)), gate), np.float64)
    assert not np.any(np.asarray(out, np.float32)[sum(sizes) :])
    error = np.linalg.norm(np.asarray(out, np.float64) - expected)
    assert error <= 4e-3 * np.linalg.norm(expected), f"{error=}"
