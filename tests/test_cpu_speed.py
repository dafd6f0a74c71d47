"""The promised CPU ratios beside transformers, measured in one run; needs a machine that is
otherwise idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_cpu_speed_holds_its_ratios_to_transformers() -> None:
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    del env["OMP_NUM_THREADS"]  # the peer chooses its threads itself
    command = [sys.executable, str(root / "scripts" / "cpu_check")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and result["ok"], result
