"""Every implementation of the grouped matmul by name, and each platform's order. Calls none."""

from __future__ import annotations

import functools

from pallas_kernels.gmm import mosaic_gpu, pallas_triton, ragged_dot, reference, xla

#: Each is (x [M, I], weights [G, I, O], group_sizes [G], *, out_dtype) → out [M, O]. The
#: interpreted one runs the GPU kernel's code on CPU, for tests.
IMPLEMENTATIONS = {
    "reference": reference.matmul,
    "xla": xla.matmul,
    "ragged_dot": ragged_dot.matmul,
    "mosaic_gpu": mosaic_gpu.matmul,
    "pallas_triton": pallas_triton.matmul,
    "pallas_triton_interpret": functools.partial(pallas_triton.matmul, interpret=True),
}

ORDERS = {"cpu": ("xla",), "gpu": ("pallas_triton", "xla"), "tpu": ("ragged_dot", "xla")}
