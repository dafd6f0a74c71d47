"""The one grouped matmul: rows sorted by group, each group's rows times the group's own matrix.

Legend: M rows, G groups (experts), I and O the width of a row before and after.

Rows are sorted: group 0 has the first `group_sizes[0]` of them, group 1 those behind, and so on.
Rows beyond the sum belong to nobody. Knows nothing of routers, tokens or devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.gmm.gates import GATES, gated
from pallas_kernels.gmm.implementations import IMPLEMENTATIONS, ORDERS

__all__ = ["GATES", "IMPLEMENTATIONS", "ORDERS", "gated", "grouped_matmul"]


def grouped_matmul(
    x: jax.Array,  # [M, I]
    weights: jax.Array,  # [G, I, O]
    group_sizes: jax.Array,  # int32[G], their sum at most M
    *,
    out_dtype: jnp.dtype | str | None = None,
    gate: str | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """[M, O]: row m is x[m] · weights[group of m], and 0 beyond the last group's rows, whatever x
    holds there.

    Sums are float32 and rounded once, to `out_dtype` (None: x's); float32 inputs are multiplied in
    full precision. Weights of a dtype other than x's are converted to it first.

    Args:
        gate: of GATES; [M, O / 2] then, what it makes of the two halves of each row.
        implementation: of IMPLEMENTATIONS; None: the first of ORDERS[platform] that serves.
        platform: what the program is compiled for; None: this process's default backend, which is
            wrong when compiling ahead of time for another one.

    Raises ValueError or NotImplementedError as `dispatch` says.
    """
    assert weights.ndim == 3 and x.shape[1:] == weights.shape[1:2], f"{x.shape=} {weights.shape=}"
    assert group_sizes.shape == weights.shape[:1], f"{group_sizes.shape=} {weights.shape=}"
    assert group_sizes.dtype == jnp.int32, f"{group_sizes.dtype=}"
    dtype = jnp.dtype(out_dtype or x.dtype)
    if x.shape[0] == 0:
        return jnp.zeros((0, weights.shape[2] // (1 if gate is None else 2)), dtype)

    with jax.named_scope("grouped_matmul"):
        calls = {
            name: functools.partial(call, x, weights, group_sizes, out_dtype=dtype, gate=gate)
            for name, call in IMPLEMENTATIONS.items()
        }
        return dispatch(calls, ORDERS, name=implementation, platform=platform)
