"""The speed table's goals: each is a row that is measured, and is judged in the right direction."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.gpu_targets import TARGETS, compared

ROOT = Path(__file__).parents[1]


def test_a_goal_is_judged_in_its_direction_and_shares_are_derived() -> None:
    rows = compared(
        {
            "decode_256": {"ms": 10.0},
            "full_sampler_256": {"ms": 11.5},
            "prefill_512x1024": {"tokens_per_s": 50_000},
            "online_8": {"p99_itl_ms": 9.0, "median_itl_ms": 6.0},
            "http_256_streams": {"output_throughput": 90.0},
            "engine_256_streams": {"output_tokens_per_s": 100.0},
            "offline_512": {"error": "no memory"},
            "something else": {"s": 1},
        }
    )
    assert rows["decode_256"]["goal"] == {
        "figure": "ms", "target": 15.9, "met": True, "peer": 19.42,
    }  # fmt: skip
    assert rows["full_sampler_256"]["of_greedy"] == 1.15
    assert not rows["full_sampler_256"]["goal"]["met"]
    assert rows["prefill_512x1024"]["goal"]["met"] and rows["online_8"]["goal"]["met"]
    assert rows["http_256_streams"]["of_engine"] == 0.9
    assert not rows["http_256_streams"]["goal"]["met"]
    assert rows["offline_512"] == {"error": "no memory"} and rows["something else"] == {"s": 1}


def test_the_kept_table_has_every_goal_and_still_judges_as_it_is_written() -> None:
    runs = json.loads((ROOT / "docs" / "performance" / "h200.json").read_text())
    rows = {name: row for run in runs for name, row in run["rows"].items()}
    assert set(TARGETS) <= set(rows)
    assert all(rows[name]["goal"] == target.judge(rows[name]) for name, target in TARGETS.items())
    assert all(run["command"] and run["card"] and run["date"] for run in runs)
    page = (ROOT / "docs" / "performance" / "README.md").read_text()
    for name in ("decode_1", "decode_256", "decode_64_at_8k"):
        assert f"{rows[name]['ms']:.2f}" in page, name
