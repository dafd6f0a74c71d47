"""What TPU attention asks of heads and page tables is what its kernel says of itself."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk

from jserve.errors import ConfigError
from jserve.models.head_layout import HeadLayout
from jserve.types import ModelConfig, RopeConfig
from jserve.types.kv_layout import KV_LAYOUTS, KVLayout, table_pages
from pallas_kernels.attention.mosaic_tpu import HEAD_DIM

TPU = KV_LAYOUTS["tpu"]


def kernel_takes(kv_heads: int, kv_dtype: str) -> bool:
    """Of a device, each with three query heads."""
    try:
        get_min_heads_per_blk(3 * kv_heads, 2 * kv_heads, jnp.bfloat16, jnp.dtype(kv_dtype))
    except ValueError:
        return False
    return True


def test_each_device_of_a_tpu_stores_the_fewest_heads_that_the_kernel_takes() -> None:
    assert TPU.head_dim == HEAD_DIM
    for kv_heads in range(1, 65):
        fewest = next(n for n in range(kv_heads, 100) if kernel_takes(n, "bfloat16"))
        assert TPU.heads(kv_heads, 1) == fewest, f"{kv_heads=}"
        assert kernel_takes(fewest, "float32"), f"{kv_heads=}"
    assert [TPU.heads(9, ways) for ways in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]
    assert KV_LAYOUTS["gpu"].heads(9, 2) == KV_LAYOUTS["cpu"].heads(9, 2) == 5


def test_float8_is_for_the_head_counts_that_the_kernel_takes() -> None:
    stored = {TPU.heads(n, 1) for n in range(1, 65)}
    taken = {n for n in stored if TPU.takes_float8(n)}
    assert taken == {n for n in stored if kernel_takes(n, "float8_e4m3fn") and n % 2 == 0}
    assert {2, 4, 8, 16} < taken and 1 in stored - taken


def test_page_tables_fit_by_whole_tiles() -> None:
    assert TPU.holds_tables(256, 896) and not TPU.holds_tables(256, 897)
    assert TPU.most_pages(256) == 896 and TPU.most_slots(896) == 256
    assert KVLayout().holds_tables(4096, 1 << 20)
    assert [table_pages(length, 16) for length in (15, 16, 17)] == [2, 2, 3]


MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position=128,
    rope=RopeConfig(theta=10000.0),
    dtype="bfloat16",
)


def test_heads_that_fill_up_a_tile_are_no_replicas() -> None:
    heads = HeadLayout.of(MODEL, 1, TPU)
    assert (heads.num_kv_heads, heads.replicas, heads.group) == (4, 1, 3)
    assert HeadLayout.of(MODEL, 8, TPU) == HeadLayout.of(MODEL, 8, KV_LAYOUTS["gpu"])


def test_longer_heads_than_the_kernel_takes_are_refused() -> None:
    long = dataclasses.replace(MODEL, head_dim=256)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has heads of 256 numbers.*128"):
        HeadLayout.of(long, 1, TPU)
    assert HeadLayout.of(long, 1, KV_LAYOUTS["gpu"]).num_kv_heads == 3
