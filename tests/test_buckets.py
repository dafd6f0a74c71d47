"""Sizes, when programs become ready, and the guard against compilation while serving."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.runner import startup
from jserve.runner.buckets import Buckets, Key, at_least
from jserve.runner.guard import CompileGuard, RecompileError
from jserve.runner.manifest import Manifest, Program


@pytest.mark.parametrize("slots", [1, 2, 5, 32, 256])
@pytest.mark.parametrize("chunk", [16, 64, 100, 256, 8192])
@pytest.mark.parametrize("least", [1, 2])
def test_padding_is_at_most_twice_the_real_size(slots, chunk, least):
    buckets = Buckets.of(slots, chunk, least)
    assert buckets.rows[0] == min(least, slots) and buckets.num_slots == slots
    assert buckets.tokens[-1] == chunk
    for rows in range(1, slots + 1):
        assert rows <= at_least(buckets.rows, rows)[0] <= 2 * rows
    for tokens in range(2, chunk + 1):
        assert tokens <= at_least(buckets.tokens, tokens)[0] <= 2 * tokens


@pytest.mark.parametrize(("platform", "least"), [("cpu", 1), ("tpu", 1), ("gpu", 2)])
def test_on_gpus_a_single_row_is_computed_beside_a_spare_one(monkeypatch, platform, least):
    monkeypatch.setattr(startup, "Programs", lambda _, buckets: buckets)
    monkeypatch.setattr(startup, "Shapes", lambda *args, **kwargs: None)
    monkeypatch.setattr(startup.Sizing, "shares", lambda _: ())
    settings: Any = MagicMock(num_slots=16, chunked_prefill_size=64)
    rules: Any = SimpleNamespace(platform=platform, ranks=None)
    buckets: Any = startup.Sizing(MagicMock(), rules, settings).programs(8)
    assert buckets.rows[0] == least and buckets.rows[-1] == 16


def test_a_head_that_does_just_what_is_asked_is_preferred_then_one_that_does_more():
    buckets = Buckets.of(4, 16)
    small, large = [("head", 2), ("head", 4)], [("head", 4)]
    plain, full, all_ = (False, False), (True, False), (True, True)
    found = [tuple(key) for key in buckets.heads(2, False, False)]
    assert found == [(*size, *variant) for variant in (plain, full, all_) for size in small]
    assert list(buckets.heads(3, True, False)) == [(*large[0], *full), (*large[0], *all_)]
    assert list(buckets.heads(4, False, True)) == [(*large[0], *all_)]
    assert [tuple(key) for key in buckets.forwards(True, 5)] == [
        ("forward", size, True, False) for size in (8, 16)
    ]


def program(key: Key) -> Program:
    def function(x: jax.Array) -> jax.Array:
        return x * key.size

    return Program(key, function, (jax.ShapeDtypeStruct((2,), jnp.float32),), (), None)


def test_ready_needs_the_required_programs_and_the_rest_follows(monkeypatch):
    gate = threading.Event()
    compile_one = jax.stages.Lowered.compile
    lowered = []

    def slow(self, *args, **kwargs):
        if "3.000000e+00" in self.as_text() or "1.000000e+00" in self.as_text():
            assert gate.wait(30)
        return compile_one(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    guard = CompileGuard("error")
    keys = [Key("f", size) for size in (8, 3, 5)]
    manifest = Manifest([program(keys[0])], [program(k) for k in keys[1:]], guard)
    manifest.compile(lambda done, total: lowered.append((done, total)), everything=False)
    assert lowered[-1][1] == 3 and lowered[-1][0] < 3, "ready before all is compiled"
    assert keys[0] in manifest.ready and keys[1] not in manifest.ready
    assert np.asarray(manifest.ready[keys[0]](np.ones(2, np.float32))).tolist() == [8, 8]
    gate.set()
    manifest.wait_all()
    assert set(manifest.ready) == set(keys) and manifest.total == 3
    guard.close()


def test_a_program_that_cannot_compile_fails_loudly(monkeypatch, caplog):
    compile_one = jax.stages.Lowered.compile

    def broken(self, *args, **kwargs):
        if "3.000000e+00" in self.as_text():
            raise RuntimeError("no memory")
        return compile_one(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", broken)
    guard = CompileGuard("off")
    good, bad = program(Key("f", 1)), program(Key("f", 3))
    with pytest.raises(RuntimeError, match="no memory"):
        Manifest([bad], [good], guard).compile(lambda done, total: None, everything=False)
    manifest = Manifest([good], [bad], guard)
    manifest.compile(lambda done, total: None, everything=False)
    with pytest.raises(RuntimeError, match="no memory"):
        manifest.wait_all()
    assert set(manifest.ready) == {good.key} and "does not compile" in caplog.text
    guard.close()


def fresh() -> None:
    jax.jit(lambda x: x + 1)(np.ones(3))


@pytest.mark.parametrize("mode", ["off", "warn", "error"])
def test_the_guard_counts_a_compilation_inside_a_step(mode, caplog):
    guard = CompileGuard(mode)
    with guard:
        fresh()
    assert guard.recompiles == 0, "not armed before everything is compiled"
    guard.arm()
    fresh()
    thread = threading.Thread(target=fresh)
    with guard:
        thread.start()
        thread.join()
    assert guard.recompiles == 0, "other threads, and work between steps, are not its business"
    if mode == "error":
        with pytest.raises(RecompileError), guard:
            fresh()
    else:
        with guard:
            fresh()
    assert guard.recompiles == 1
    assert ("while serving" in caplog.text) == (mode != "off")
    with guard:
        pass
    guard.close()
    with guard:
        fresh()
    assert guard.recompiles == 1
