"""The KV pool of one cache group: one or two flat donated arrays of pages.

Owns its shape and nothing else: which pages are free, shared or cached is `pages.py`'s and
`radix.py`'s business. Split layout (GPU, CPU): k and v are [L · pages, page, K, D]. Fused layout
(TPU): k is [L · pages, page, 2 · K, 128] with K at even and V at odd heads, v is None. Latent
layout (GPU, CPU): k is [L · pages, page, 1, D], whole on every device, v is None. float8 is held as
pallas_kernels/float8.py says.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jserve.types import KVShape
from jserve.types.kv_layout import KV_LAYOUTS
from pallas_kernels.float8 import BITS
from sharding.rules import Rules

_AXES = (None, None, "kv_heads", None)


class KVPool(NamedTuple):
    """Layer i's pages are [i · num_pages, (i + 1) · num_pages), each layer's first is trash. Layers
    are those of a KVShape; its groups have each a pool of their own. `tally` is no page: what a
    model with experts counts as it goes (layers/expert_tally.py).
    """

    k: jax.Array
    v: jax.Array | None
    groups: tuple[KVPool, ...] = ()
    tally: tuple[jax.Array, ...] = ()


def pool_spec(
    shape: KVShape,
    num_pages: int,
    page_size: int,
    dtype: str,
    rules: Rules,
    group_pages: tuple[int, ...] = (),
) -> KVPool:
    """The pool as ShapeDtypeStructs with shardings: what a program is lowered for. `group_pages`:
    of each of the shape's groups.
    """
    latent, layout = shape.value_dim is not None, KV_LAYOUTS[rules.platform]
    fused = layout.fused and not latent
    heads = shape.num_kv_heads * (2 if fused else 1)
    head_dim = shape.head_dim if latent else layout.head_dim or shape.head_dim
    array = jax.ShapeDtypeStruct(
        (shape.num_layers * num_pages, page_size, heads, head_dim),
        pool_dtype(dtype, rules.platform),
        sharding=rules.sharding((None,) * len(_AXES) if latent else _AXES),
    )
    groups = tuple(
        pool_spec(group, pages, page_size, dtype, rules)
        for group, pages in zip(shape.groups, group_pages, strict=True)
    )
    return KVPool(array, None if fused or latent else array, groups)  # type: ignore[arg-type]


def pool_dtype(dtype: str, platform: str) -> jnp.dtype:
    """Of the arrays of a pool of `dtype` on a platform."""
    wanted = jnp.dtype(dtype)
    return BITS.get(wanted, wanted) if platform == "cpu" else wanted
