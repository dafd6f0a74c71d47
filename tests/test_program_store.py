"""Compiled programs on disk: found again by the same build only, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.runner import store
from jserve.runner.buckets import Key
from jserve.runner.guard import CompileGuard
from jserve.runner.manifest import Manifest, Program
from jserve.runner.store import ProgramStore

KEYS = [Key("f", 8), Key("f", 3, True), Key("g", 5, False, True)]


def program(key: Key) -> Program:
    def function(x: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * key.size, pool + 1

    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    return Program(key, function, (spec, spec), (1,), None)


def started(folder: Path | None, *facts: object) -> Manifest:
    guard = CompileGuard("error")
    programs = [program(key) for key in KEYS]
    kept = ProgramStore(folder, facts, jax.devices()[:1])
    manifest = Manifest(programs[:1], programs[1:], guard, store=kept)
    manifest.compile(lambda done, total: None, everything=True)
    guard.close()
    return manifest


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """Keys of the programs that were lowered."""
    keys: list[Key] = []
    lower = Program.lower

    def noted(self: Program) -> jax.stages.Lowered:
        keys.append(self.key)
        return lower(self)

    monkeypatch.setattr(Program, "lower", noted)
    return keys


def answers(manifest: Manifest) -> list[list[float]]:
    x = np.ones(2, np.float32)
    results = [manifest.ready[key](x, jnp.zeros(2)) for key in KEYS]
    return [[*np.asarray(y).tolist(), *np.asarray(pool).tolist()] for y, pool in results]


def test_a_second_start_lowers_nothing_and_computes_the_same(
    tmp_path: Path, lowered: list[Key]
) -> None:
    first = answers(started(tmp_path, "model"))
    assert lowered == KEYS and first == [[n, n, 1, 1] for n in (8, 3, 5)]
    again = started(tmp_path, "model")
    assert lowered == KEYS, "nothing was lowered again"
    assert set(again.ready) == set(KEYS) and answers(again) == first
    assert again.ready[KEYS[0]].memory_analysis() is not None, "its temporaries size the pool"


def test_a_loaded_program_refuses_wrong_shapes_and_dtypes_like_a_compiled_one(
    tmp_path: Path,
) -> None:
    started(tmp_path)
    loaded = started(tmp_path).ready[KEYS[0]]
    for wrong in (np.ones(3, np.float32), np.ones(2, np.int32)):
        with pytest.raises(TypeError):
            loaded(wrong, jnp.zeros(2))


def test_its_pool_is_donated(tmp_path: Path) -> None:
    started(tmp_path)
    pool = jnp.zeros(2)
    started(tmp_path).ready[KEYS[0]](np.ones(2, np.float32), pool)
    assert pool.is_deleted()


def test_other_facts_flags_or_source_find_nothing(
    tmp_path: Path, lowered: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path, "model")
    started(tmp_path, "another model")
    assert len(lowered) == 6
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    started(tmp_path, "model")
    assert len(lowered) == 9
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(store, "_PACKAGES", ("package",))
    started(tmp_path / "builds", "model")
    (tmp_path / "package" / "__init__.py").write_text("one = 2\n")
    started(tmp_path / "builds", "model")
    assert len(lowered) == 15


def test_a_broken_file_is_compiled_anew(
    tmp_path: Path, lowered: list[Key], caplog: pytest.LogCaptureFixture
) -> None:
    first = answers(started(tmp_path))
    (build,) = tmp_path.iterdir()
    for file in build.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert answers(started(tmp_path)) == first and len(lowered) == 6
    assert "cannot be loaded" in caplog.text
    started(tmp_path)
    assert len(lowered) == 6, "it was kept again"


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert answers(started(tmp_path / "file")) == answers(started(None))
    assert "not kept" in caplog.text


def test_builds_that_were_used_last_stay(tmp_path: Path, lowered: list[Key]) -> None:
    for fact in range(6):
        started(tmp_path, fact)
        (newest,) = [path for path in tmp_path.iterdir() if path.stat().st_mtime > 1e9]
        os.utime(newest, (fact, fact))
    assert len(list(tmp_path.iterdir())) == 4
    lowered.clear()
    started(tmp_path, 5)
    assert not lowered
    started(tmp_path, 0)
    assert lowered == KEYS
