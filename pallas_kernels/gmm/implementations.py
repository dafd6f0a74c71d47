"""Every implementation of the grouped matmul by name, and each platform's order. Calls none."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from pallas_kernels.gmm import mosaic_gpu, pallas_triton, ragged_dot, reference, xla
from pallas_kernels.gmm.gates import then_gated

_interpreted = functools.partial(pallas_triton.matmul, interpret=True)

#: Each is (x [M, I], weights [G, I, O], group_sizes [G], *, out_dtype, gate=None) → out [M, O], or
#: [M, O / 2]. The interpreted one runs the GPU kernel's code on CPU, for tests.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": functools.partial(then_gated, reference.matmul),
    "xla": functools.partial(then_gated, xla.matmul),
    "ragged_dot": functools.partial(then_gated, ragged_dot.matmul),
    "mosaic_gpu": mosaic_gpu.matmul,
    "pallas_triton": functools.partial(then_gated, pallas_triton.matmul),
    "pallas_triton_interpret": functools.partial(then_gated, _interpreted),
}

ORDERS = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "pallas_triton", "xla"),
    "tpu": ("ragged_dot", "xla"),
}
