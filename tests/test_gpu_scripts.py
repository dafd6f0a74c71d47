"""The scripts that prove and measure on a GPU, run dry on this CPU: small shapes, a tiny model, the
interpreted kernels. A dry run takes the way of a real one, so what it cannot reach is the card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from scripts.gpu_targets import TARGETS

ROOT = Path(__file__).parents[1]


#: Nobody reads the figures, and compiling takes nearly all the time.
OLDER = jax.version.__version_info__ < (0, 11)  # newer compilers do not know the flag
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4"
    + " --xla_cpu_use_fusion_emitters=false" * OLDER,
}
#: A real model that decodes.
OPTIMIZED = {"XLA_FLAGS": ""}


def started(
    script: str, *flags: str, how: dict[str, str] = QUICK
) -> subprocess.CompletedProcess[str]:
    """From another folder and without PYTHONPATH, as a user would."""
    env = {**os.environ, "JAX_NUMPY_RANK_PROMOTION": "allow", "PYTHONPATH": "", **how}
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env python3")
    command = [sys.executable, str(path), "--tiny", *flags]
    return subprocess.run(command, env=env, cwd=path.parent, capture_output=True, text=True)


def dry_run(script: str, *flags: str, how: dict[str, str] = QUICK) -> list[dict[str, Any]]:
    """The JSON objects that it prints, one a line; other lines are for people."""
    done = started(script, *flags, how=how)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("{"), lines[-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def figures(value: Any) -> Iterator[float]:
    """Every number inside."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from figures(inner)
    else:
        yield value


def assert_positive(value: Any) -> None:
    found = list(figures(value))
    assert found and all(figure > 0 for figure in found), value


def test_attention_kernels_are_proven_and_timed() -> None:
    *lines, last = dry_run("gpu_kernels.py")
    assert last == {"failures": 0}
    (proof,) = [line for line in lines if "cases" in line]
    assert (proof["cases"], proof["wrong"]) == (2, 0)
    assert_positive(proof["worst_error"])
    (far,) = [line for line in lines if "case" in line]
    assert 0 < far["relative_error"] < 3e-3
    timed = {line["shape"]: line for line in lines if "shape" in line}
    assert list(timed) == ["decode 2x40", "prefill 2x24"]
    assert_positive([[line["us"], line["op_us"]] for line in timed.values()])


def test_single_steps_are_timed_beside_their_floors() -> None:
    (last,) = dry_run("gpu_steps.py")
    assert list(last) == ["decode_2", "prefill_16"]
    assert all(set(row) == {"ms", "floor_ms"} and len(row["ms"]) == 2 for row in last.values())
    assert_positive(last)


def test_attention_over_latents_is_proven_and_timed() -> None:
    *lines, last = dry_run("gpu_latent.py")
    assert last["wrong"] == []
    (error,) = [line["error"] for line in lines if "error" in line]
    assert 0 < error < 1e-2
    (times,) = last["us_and_ratio"].values()
    assert [name.split()[0] for name in times] == ["decode", "prefill"]
    assert_positive(times)


@pytest.mark.full
def test_the_grouped_matmul_is_proven_and_timed() -> None:
    *lines, last = dry_run("gpu_gmm.py")
    (proof,) = [line for line in lines if "cases" in line]
    assert last["wrong"] == proof["wrong"] == 0 and proof["cases"] == 4
    assert list(last["us_and_ratio"]) == ["pallas_triton_interpret"]
    assert_positive(last["us_and_ratio"])


@pytest.mark.full
def test_the_grouped_matmul_is_timed_beside_a_dense_one() -> None:
    *_, last = dry_run("gpu_gmm.py", "--held")
    ours, dense = last["held"]["down"].values()
    assert ours["us"] > 0 and dense["us"] > 0


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--ep", "2", "--tp", "2"), marks=pytest.mark.full)]
)
def test_sparse_layers_are_proven_and_timed(flags: tuple[str, ...]) -> None:
    (last,) = dry_run("gpu_moe.py", *flags)
    ways = 2 if flags else 1
    assert (last["wrong"], last["ep"], last["tp"]) == (0, ways, ways)
    assert list(last["layer"]) == ["8"] and last["layer"]["8"]["us"] > 0


@pytest.mark.full
def test_whole_runs_are_divided_among_their_steps() -> None:
    (last,) = dry_run("gpu_loop.py")
    assert list(last) == ["offline", "shared_cold", "shared_warm", "online_24", "online_8"]
    for run in last.values():
        assert run["seconds"] > 0 and set(run) > {"seconds", "without prompts"}, run
        assert all(row["steps"] > 0 for name, row in run.items() if name.startswith("up to"))
    assert last["offline"]["without prompts"]["steps"] > 0


@pytest.mark.full
def test_grammars_are_measured_beside_free_requests() -> None:
    last = dry_run("grammar_perf.py")[-1]
    assert_positive(last["decode"])
    assert {"alone", "beside", "p99_ratio", "outcomes"} == set(last["latency"])
    assert_positive(last["latency"])
    assert last["rows_masked"] > 0 and last["recompiles"] == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_row_of_the_speed_table_is_measured_and_has_its_goal() -> None:
    (last,) = dry_run("gpu_check", "--perf")
    assert {"date", "card", "card_after", "jax", "rows"} == set(last)
    rows = last["rows"]
    assert not [name for name, row in rows.items() if "error" in row], rows
    assert set(TARGETS) | {"engine_256_streams"} == set(rows)
    assert_positive([next(iter(row.values())) for row in rows.values()])
    assert all(rows[name]["goal"]["target"] == target.bound for name, target in TARGETS.items())
    assert rows["engine"]["recompiles_total"] == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_stage_of_the_check_runs_and_none_fails() -> None:
    *kernels, last = dry_run("gpu_check", how=OPTIMIZED)
    assert kernels[-1] == {"failures": 0}
    assert last["failed"] == [] and last["kernels"] is True
    assert last["golden float32 xla"]["steps_compared"] == 48
    rows = last["decode xla"]
    assert_positive([rows["start_s"], rows["max_total_num_tokens"]])
    assert_positive([[rows[batch][figure] for figure in ("ms", "ratio")] for batch in ("1", "2")])


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "flag", "known"),
    [
        ("gpu_kernels.py", "--implementations", "mosaic_gpu"),
        ("gpu_gmm.py", "--implementations", "mosaic_gpu"),
        ("gpu_check", "--backends", "pallas_triton"),
        ("gpu_check", "--stages", "golden"),
        ("gpu_check", "--perf", "decode"),
    ],
)
def test_what_a_script_does_not_know_is_refused_so_defaults_exist(
    script: str, flag: str, known: str
) -> None:
    done = started(script, flag, "nothing")
    assert done.returncode != 0 and not done.stdout
    assert "nothing" in done.stderr and known in done.stderr
