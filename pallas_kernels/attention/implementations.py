"""Every implementation of the attention op by name, and each platform's order. Calls none."""

from __future__ import annotations

import functools

import jax

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
    "tpu": ("mosaic_tpu", "xla"),
}


def uses_fused_layout(implementation: str | None, platform: str | None = None) -> bool:
    """Whether the pool of this implementation (None: the platform's first) holds K and V in one
    fused array.
    """
    name = implementation or ORDERS[platform or jax.default_backend()][0]
    return name == "mosaic_tpu"
