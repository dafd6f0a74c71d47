"""The KV pool of one cache group: one or two flat donated arrays of pages.

Owns the layout and nothing else: which pages are free, shared or cached is `pages.py`'s and
`radix.py`'s business. Split layout (GPU, CPU): k and v are [L · pages, page, K, D]. Fused layout
(TPU): k is [L · pages, page, 2 · K, D] with K at even and V at odd heads, v is None. Latent layout
(GPU, CPU): k is [L · pages, page, 1, D], whole on every device, v is None. float8 is held as
pallas_kernels/float8.py says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jserve.types import KVShape
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
    latent = shape.value_dim is not None
    fused = rules.platform == "tpu" and not latent
    heads = shape.num_kv_heads * (2 if fused else 1)
    array = jax.ShapeDtypeStruct(
        (shape.num_layers * num_pages, page_size, heads, shape.head_dim),
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


def allocate_pool(
    shape: KVShape, num_pages: int, page_size: int, dtype: str, rules: Rules
) -> KVPool:
    """A zeroed pool, created with its sharding (never whole on one device)."""
    spec = pool_spec(shape, num_pages, page_size, dtype, rules)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), spec),
        out_shardings=jax.tree.map(lambda a: a.sharding, spec),
    )
    return zeros()


def bytes_per_page(shape: KVShape, page_size: int, dtype: str) -> int:
    """Bytes of one page over all layers and the whole mesh, K and V together; without groups. A
    latent counts once, however many devices have it.
    """
    item, parts = jnp.dtype(dtype).itemsize, 2 if shape.value_dim is None else 1
    return math.prod((shape.num_layers, page_size, parts, shape.num_kv_heads, shape.head_dim, item))


def gather_pages(pool: KVPool, pages: jax.Array, num_layers: int) -> KVPool:
    """Copies of the given pages of every layer: leaves are [L, n, page, heads, D]. Of a pool
    without groups and tally; a group's pool is one.
    """
    return jax.tree.map(lambda leaf: leaf[_flat(leaf, pages, num_layers)], pool)


def scatter_pages(pool: KVPool, pages: jax.Array, content: KVPool, num_layers: int) -> KVPool:
    """The pool with `content`, as gather_pages returns it, written at pages of every layer."""
    return jax.tree.map(
        lambda leaf, new: leaf.at[_flat(leaf, pages, num_layers)].set(new), pool, content
    )


def _flat(leaf: jax.Array, pages: jax.Array, num_layers: int) -> jax.Array:
    """Row numbers [L, n] in the flat pool."""
    num_pages = leaf.shape[0] // num_layers
    return jnp.arange(num_layers)[:, None] * num_pages + pages[None, :]
