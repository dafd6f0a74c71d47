"""Every implementation of the attention op by name, and each platform's order. Calls none."""

from __future__ import annotations

import functools

from pallas_kernels.attention import (
    jax_triton,
    mosaic_gpu,
    mosaic_tpu,
    pallas_triton,
    reference,
    xla,
)

#: Every implementation reads a pool that holds this step's keys and values: (q, kv_layer, meta, *,
#: scale, window, soft_cap, sinks) → out [T, H, D]. The interpreted one runs the GPU kernel's code
#: on CPU, for tests.
IMPLEMENTATIONS = {
    "reference": reference.attention,
    "xla": xla.attention,
    "pallas_triton": pallas_triton.attention,
    "pallas_triton_interpret": functools.partial(pallas_triton.attention, interpret=True),
    "mosaic_gpu": mosaic_gpu.attention,
    "jax_triton": jax_triton.attention,
    "mosaic_tpu": mosaic_tpu.attention,
}

ORDERS = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "pallas_triton", "jax_triton", "xla"),
    "tpu": ("mosaic_tpu",),
}
