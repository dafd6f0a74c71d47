"""The guide to the language: its code runs, one block after the other, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs/language.md").read_text(encoding="utf-8")


def blocks(tag: str) -> list[str]:
    return re.findall(rf"^```python {tag}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_block_is_run_by_somebody():
    assert len(blocks("run")) + len(blocks("test")) == GUIDE.count("```python")
    assert len(blocks("run")) >= 9
    for block in blocks("run"):
        compile(block, "guide", "exec")


def test_what_it_says_about_tests_without_a_model_holds():
    (block,) = blocks("test")
    exec(compile(block, "guide", "exec"), {})


def test_its_commands_are_there(capsys):
    commands = re.findall(r"^(jserve \w+ \w+|python -m [\w.]+)", GUIDE, re.MULTILINE)
    assert set(commands) == {
        "jserve lang explain",
        "jserve bench program",
        "python -m jserve.bench.programs",
    }
    for command in ("lang explain", "bench program"):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0


def test_every_name_that_it_writes_exists():
    import jserve.lang as sgl

    names = set(re.findall(r"\bsgl\.(\w+)", GUIDE))
    assert len(names) > 15
    assert [name for name in names if name not in sgl.__all__] == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_guide_runs_on_the_real_model():
    """As one session without a file, like at an interpreter's prompt."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("run"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert "Paris" in done.stdout
    assert "gen('bad'): top_p must be in" in done.stdout
    assert re.search(r"\b\d+ calls: \d+ reused, \d+ computed", done.stdout)


@pytest.mark.full
def test_the_guides_programs_are_clean_for_a_type_checker(tmp_path):
    (tmp_path / "guide.py").write_text("\n".join(blocks("run") + blocks("test")))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
