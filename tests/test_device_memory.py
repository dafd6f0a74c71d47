"""What a device has room for: temporaries by platform, and pools that were asked for."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import psutil
import pytest

from jserve.config import Config
from jserve.engine.local import local_ends
from jserve.engine.startup import build
from jserve.errors import ConfigError
from jserve.runner.manifest import Manifest
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
        max_total_tokens=tokens,
        page_size=16,
        mem_fraction_static=0.9,
        context_length=4096,
        num_slots=64,
        chunked_prefill_size=2048,
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


@pytest.mark.parametrize("tokens", [None, 16])
@pytest.mark.parametrize("taker", ["weights", "state", "temporaries"])
def test_what_leaves_no_room_for_a_pool_is_told_with_its_flag(
    taker: str, tokens: int | None
) -> None:
    full = dataclasses.replace(MEMORY, **{"weights": GIB, taker: 17 * GIB})
    with pytest.raises(ConfigError, match=r"16\.0 GiB .*no room for a KV pool beside") as error:
        sizing(tokens).pages(full)
    sizes = {name: "17.0" if name == taker else "0.0" for name in ("state", "temporaries")}
    slots = "--max-running-requests 64 of --context-length 4096"
    assert f"{slots} ({sizes['state']} GiB)" in str(error.value)
    step = f"a step of --chunked-prefill-size 2048 ({sizes['temporaries']} GiB)"
    assert step in str(error.value)


def test_a_pool_over_the_ram_of_a_cpu_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tmp_path / "shape.json"
    sizes = {"hidden_size": 16, "head_dim": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
    others = {"vocab_size": 300, "intermediate_size": 16, "max_position_embeddings": 64}
    shape.write_text(json.dumps({"model_type": "llama", **sizes, **others}))
    flags = {"model_path": str(shape), "load_format": "dummy", "device": "cpu"}
    config = Config.from_flags(**flags, max_total_tokens=2_000_000_000, compilation_cache_dir="off")
    monkeypatch.setattr(Manifest, "compile", None)
    with pytest.raises(ConfigError) as error:
        build(config, local_ends()[1])
    room = re.fullmatch(
        "--max-total-tokens 2000000000 needs a KV pool of 30517.6 GiB on each device; beside "
        r"weights and a step, ([\d.]+) GiB have room for (\d+) tokens at most",
        str(error.value),
    )
    assert room is not None, str(error.value)
    ram = psutil.virtual_memory().total
    assert float(room[1]) * GIB <= 1.01 * ram and 0 < int(room[2]) * 16384 < ram


def test_the_devices_of_a_cpu_share_its_ram() -> None:
    rules: Any = SimpleNamespace(
        platform="cpu", mesh=SimpleNamespace(devices=SimpleNamespace(size=4))
    )
    shared = dataclasses.replace(sizing(None), rules=rules, host_bytes=8 * GIB)
    assert shared.limit() == 2 * GIB
    assert dataclasses.replace(shared, host_bytes=None).limit() is None


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
