"""The attention op compiled for TPU v5e by libtpu, without a TPU: it lowers, fits, and updates the
pool in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.attention import AttentionMeta, KVLayer, attend

HEADS, KV_HEADS, POOL_DIM = 32, 8, 128
ROWS, PAGES, PAGE = 16, 32, 64
POOL = (
    4 * 2048,
    PAGE,
    2 * KV_HEADS,
    POOL_DIM,
)  # 4 layers; 4 GiB over 4 chips: a copy could not hide in VMEM


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    return Mesh(np.array(topology.devices).reshape(4), ("tensor",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("kind", "head_dim", "kv_dtype"),
    [
        ("decode", 64, "bfloat16"),
        ("decode", 128, "bfloat16"),
        ("mixed", 64, "bfloat16"),
        ("mixed", 128, "bfloat16"),
        ("mixed", 128, "float8_e4m3fn"),
        ("decode", 64, "float8_e5m2"),
    ],
)
def test_it_compiles_for_v5e_and_never_copies_the_pool(
    mesh: Mesh, kind: str, head_dim: int, kv_dtype: str
) -> None:
    tokens = ROWS if kind == "decode" else 128
    heads = PartitionSpec(None, "tensor", None)
    pool = PartitionSpec(None, None, "tensor", None)
    whole = PartitionSpec()

    def shape(size: tuple[int, ...], dtype: str, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    def ints(*size: int) -> jax.ShapeDtypeStruct:
        return shape(size, "int32", whole)

    meta = AttentionMeta(
        ints(ROWS + 1), ints(ROWS), ints(ROWS, PAGES), ints(tokens), ints(tokens), ints(tokens),
        ints(2), max_q_len=1 if kind == "decode" else None,
    )  # fmt: skip
    q = shape((tokens, HEADS, head_dim), "bfloat16", heads)
    k = shape((tokens, KV_HEADS, head_dim), "bfloat16", heads)

    def step(q, k, v, pool, first_page, meta):
        out, layer = attend(
            q, k, v, KVLayer(pool, None, first_page), meta,
            scale=head_dim**-0.5, window=512, implementation="mosaic_tpu",
        )  # fmt: skip
        return out, layer.k

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(heads, heads, heads, pool, whole, whole),
        out_specs=(heads, pool), check_vma=False,
    )  # fmt: skip
    traced = jax.jit(sharded, donate_argnums=3).trace(
        q, k, k, shape(POOL, kv_dtype, pool), ints(), meta
    )
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in compiled.as_text(), "the ragged paged attention kernel is missing"
    memory = compiled.memory_analysis()
    pool_bytes = jnp.dtype(kv_dtype).itemsize * int(np.prod(POOL)) // 4  # of one chip
    assert memory.alias_size_in_bytes >= pool_bytes, f"{memory.alias_size_in_bytes=} {pool_bytes=}"
    temporaries = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    assert temporaries < pool_bytes / 8, f"{temporaries=} {pool_bytes=}"
