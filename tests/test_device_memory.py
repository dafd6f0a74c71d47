"""What a device has room for: temporaries by platform, and pools that were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError
from jserve.runner.memory import DeviceMemory, temporary_bytes
from jserve.runner.reach import reached_pages
from jserve.runner.startup import Sizing

MIB, GIB = 1 << 20, 1 << 30
MEMORY = DeviceMemory(limit=16 * GIB, weights=8 * GIB, state=0, page=2 * MIB)


def program(**sizes: int) -> Any:
    names = (*(f"{kind}_size" for kind in ("argument", "output", "alias", "temp")), "peak_memory")
    analysis = SimpleNamespace(**{f"{name}_in_bytes": sizes.get(name, 0) for name in names})
    return SimpleNamespace(memory_analysis=lambda: analysis)


@pytest.mark.parametrize(("platform", "expected"), [("tpu", 70), ("gpu", 9), ("cpu", 9)])
def test_a_tpus_temporaries_are_what_is_live_at_the_peak(platform: str, expected: int) -> None:
    sizes = {"argument_size": 1000, "output_size": 504, "alias_size": 500, "temp_size": 5}
    mixed = program(**sizes, peak_memory=1070)
    assert temporary_bytes(mixed, platform) == expected
    # Without a peak, and where it is less, scratch and outputs count.
    assert temporary_bytes(program(temp_size=7), platform) == 7


def sizing(tokens: int | None) -> Sizing:
    settings: Any = SimpleNamespace(
        max_total_tokens=tokens, page_size=16, mem_fraction_static=0.9, context_length=4096
    )
    unused: Any = None
    return Sizing(unused, unused, settings)


def test_a_pool_of_so_many_tokens_must_fit_beside_weights_and_a_step() -> None:
    fitting = (MEMORY.most_pages() - 1) * 16
    assert sizing(fitting).pages(MEMORY) == fitting // 16 + 1
    with pytest.raises(ConfigError):
        sizing(fitting + 1).pages(MEMORY)
    with pytest.raises(ConfigError) as error:
        sizing(10**9).pages(MEMORY)
    assert "--max-total-tokens 1000000000 needs a KV pool of 122070.3 GiB" in str(error.value)
    assert f"16.0 GiB have room for {fitting} tokens" in str(error.value)


def test_what_a_step_takes_counts_once_it_is_known() -> None:
    tokens = (MEMORY.most_pages() - 1) * 16
    crowded = dataclasses.replace(MEMORY, temporaries=2 * GIB)
    with pytest.raises(ConfigError, match=f"--max-total-tokens {tokens} needs"):
        sizing(tokens).pages(crowded)
    full = dataclasses.replace(MEMORY, weights=17 * GIB)
    with pytest.raises(ConfigError, match="room for 0 tokens"):
        sizing(16).pages(full)


def test_a_device_that_does_not_tell_its_memory_is_taken_at_its_word() -> None:
    assert sizing(1600).pages(dataclasses.replace(MEMORY, limit=None)) == 101


def arrays_of(dtype: str, elements: int) -> Callable[[int], list[Any]]:
    """A pool with so many numbers a page in its largest array."""
    whole = SimpleNamespace(shard_shape=lambda shape: shape)
    kind = jnp.dtype(dtype)
    return lambda pages: [
        SimpleNamespace(shape=(pages, count), dtype=kind, sharding=whole)
        for count in (elements // 8, elements)
    ]


@pytest.mark.parametrize(
    ("dtype", "gib", "reached"),
    [
        ("float8_e4m3fn", 1.9, None),
        ("float8_e4m3fn", 2.5, 2**11 - 1),
        ("float8_e4m3fn", 4.0, 2**11 - 1),
        ("float8_e4m3fn", 4.5, None),
        ("float8_e4m3fn", 20.0, 2**14 - 1),  # its smaller array is of 2.5 GiB
        ("bfloat16", 2.5, None),
        ("bfloat16", 3.0, None),
    ],
)
def test_a_float8_pool_has_no_element_that_kernels_count_past(
    dtype: str, gib: float, reached: int | None
) -> None:
    pages = int(gib * 1024)
    found = reached_pages(pages, arrays_of(dtype, 2**20))
    assert found == (pages if reached is None else reached)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_float8_pool_that_was_asked_for_is_reached_whole_or_refused(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = arrays_of("float8_e4m3fn", 2**20)
    monkeypatch.setattr(
        Sizing,
        "programs",
        lambda self, pages: SimpleNamespace(shapes=SimpleNamespace(kv=arrays(pages))),
    )
    rules: Any = SimpleNamespace(platform=platform)
    asked, left = (dataclasses.replace(sizing(tokens), rules=rules) for tokens in (48_000, None))
    if platform == "gpu":
        assert left.reached(3001) == 2047
        with pytest.raises(ConfigError, match="48000 .* reach 32736 tokens"):
            asked.reached(3001)
    else:
        assert left.reached(3001) == asked.reached(3001) == 3001
