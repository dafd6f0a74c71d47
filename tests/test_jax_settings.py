"""What a process has set in JAX neither changes an engine's programs nor is changed by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import Config
from jserve.engine import devices, startup
from jserve.engine.channel import EngineEnd
from jserve.errors import ConfigError
from jserve.runner.buckets import Key
from jserve.runner.jax_settings import cache_restorer
from jserve.runner.manifest import Program

CACHE = "jax_compilation_cache_dir"


def _step(seed: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop and a draw, as the sampler has them, with a dtype that promotion settles."""
    draws = jax.random.uniform(jax.random.key(seed), (8,))
    total = jax.lax.fori_loop(0, 3, lambda i, sum: sum + i * 0.5, jnp.zeros((), jnp.float32))
    return draws, x * total + jnp.arange(8)


def _outputs() -> list[np.ndarray]:
    spec = (jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((8,), jnp.float32))
    compiled = Program(Key("f", 8), _step, spec, (), None).lower().compile()
    return [np.asarray(out) for out in compiled(np.uint32(7), np.ones(8, np.float32))]


@pytest.mark.parametrize(
    "setting",
    [
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
    ],
    ids=["x64", "promotion", "threefry", "prng"],
)
def test_a_program_is_the_same_whatever_the_process_has_set(
    setting: contextlib.AbstractContextManager[None],
) -> None:
    expected = _outputs()
    with setting:
        found = _outputs()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == np.float32
        assert (one == other).all()


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[str]:
    """A cache folder that the process has set itself."""
    before = getattr(jax.config, CACHE)
    jax.config.update(CACHE, str(tmp_path / "own"))
    yield str(tmp_path / "own")
    jax.config.update(CACHE, before)


def test_a_process_gets_its_own_compilation_cache_back(own_cache: str, tmp_path: Path) -> None:
    first, second = (cache_restorer(str(tmp_path / "engine")) for _ in range(2))
    jax.config.update(CACHE, str(tmp_path / "engine"))
    late = cache_restorer(str(tmp_path / "engine"))  # of an engine that starts while one runs
    first()
    assert getattr(jax.config, CACHE) == own_cache
    jax.config.update(CACHE, "chosen since")
    second()
    late()
    assert getattr(jax.config, CACHE) == "chosen since"


def test_an_engine_is_built_under_pinned_settings_and_gives_the_cache_back(
    own_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[contextlib.ExitStack] = []

    def built(config: Any, channel: Any, folder: str, ends: contextlib.ExitStack) -> None:
        assert not _x64()
        jax.config.update(CACHE, folder)
        seen.append(ends)
        if len(seen) == 2:
            raise ConfigError("no")

    monkeypatch.setattr(startup, "_build", built)
    folder = str(tmp_path / "engine")
    config = Config.from_flags(model_path="m", compilation_cache_dir=folder)
    channel: EngineEnd = None  # pyright: ignore[reportAssignmentType]
    with jax.enable_x64(True):
        startup.build(config, channel)
        assert _x64(), "the caller keeps its own"
    assert getattr(jax.config, CACHE) == folder, "while the engine runs"
    seen[0].close()
    assert getattr(jax.config, CACHE) == own_cache
    with pytest.raises(ConfigError):
        startup.build(config, channel)
    assert getattr(jax.config, CACHE) == own_cache, "a failed start leaves nothing behind"


def _x64() -> bool:
    return jnp.zeros((), float).dtype == np.float64


def test_a_device_that_is_not_the_one_asked_for_is_refused() -> None:
    assert jax.devices()[0].platform == "cpu"
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    asked = Config.from_flags(model_path="m", device="gpu")
    try:
        devices.claim_devices(asked)
        with pytest.raises(ConfigError, match="--device gpu cannot be used here: JAX runs on cpu"):
            devices.own_devices(asked)
        assert jax.config.jax_platforms == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_platforms", before)
    assert devices.own_devices(Config.from_flags(model_path="m", device="cpu"))
