"""The corridor stays short enough to read in an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 4500  # lines of all files that one chat request executes


@pytest.mark.timeout(300)
def test_the_files_that_a_chat_request_executes_hold_at_most_4500_lines() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.corridor"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = {line.split()[1]: int(line.split()[0]) for line in done.stdout.splitlines()[:-1]}
    corridor = ("server/chat", "engine/core", "engine/loop", "scheduler/scheduler", "cache/radix")
    for name in (*corridor, "runner/runner", "models/llama", "tokenizer/detokenizer"):
        assert f"jserve/{name}.py" in files, f"{name} is not in the corridor: {sorted(files)}"
    assert "pallas_kernels/attention/xla.py" in files
    assert sum(files.values()) <= LIMIT, done.stdout
