"""What can be run in scripts/ says what it does when asked, and does nothing that it was not asked
for: --help is answered at once, and an argument that there is not begins no measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SECONDS = 20  # to import, and to answer, the first of them
UNKNOWN = "--no-such-argument"


def programs(python: bool) -> list[str]:
    """Files that begin with #! or have a main program."""
    texts = {path.name: path.read_text() for path in SCRIPTS.iterdir() if path.is_file()}
    found = [name for name, text in texts.items() if text.startswith("#!") or "__main__" in text]
    return [name for name in sorted(found) if texts[name].startswith("#!/usr/bin/env b") != python]


# In one process, for most import jax: prints {name: [[status, output] of each way to call it]}.
RUN_ALL = """
import contextlib, io, json, os, runpy, signal, sys

def late(*_):
    raise TimeoutError("it answers nothing")

def run(path, argument):
    sys.argv, said = [path, argument], io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_path(path, run_name="__main__")
        return [0, said.getvalue()]
    except SystemExit as end:
        return [end.code, said.getvalue()]
    except BaseException as error:
        return [repr(error), said.getvalue()]
    finally:
        signal.alarm(0)

signal.signal(signal.SIGALRM, late)
folder, *names = sys.argv[1:]
calls = {name: [run(f"{folder}/{name}", one) for one in ("--help", UNKNOWN)] for name in names}
print(json.dumps(calls), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, list[tuple[int, str]]]]:
    code = RUN_ALL.replace("SECONDS", str(SECONDS)).replace("UNKNOWN", repr(UNKNOWN))
    command = [sys.executable, "-c", code, str(SCRIPTS), *programs(python=True)]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=20 * SECONDS)
        yield json.loads(said)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a script has begun ends, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", programs(python=True))
def test_a_python_script_answers_help_and_refuses_what_it_does_not_know(
    answers: dict[str, list[tuple[int, str]]], name: str
) -> None:
    (status, text), (refused, why) = answers[name]
    assert status == 0 and text.startswith("usage: ") and "--help" in text, text
    assert refused == 2 and why.startswith("usage: ") and "error: " in why, why


@pytest.mark.parametrize("name", programs(python=False))
def test_a_shell_script_answers_help_and_refuses_what_it_does_not_know(
    name: str, tmp_path: Path
) -> None:
    """Without an environment, which it would install first."""
    stub = tmp_path / "python3"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JSERVE_VENV": str(tmp_path / "venv")}

    def run(argument: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPTS / name), argument]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)

    for argument in ("--help", "-h"):
        said = run(argument)
        assert said.returncode == 0 and len(said.stdout) > 40 and not said.stderr, said
        assert not said.stdout.startswith("#") and "set -e" not in said.stdout
    if name == "test":
        return  # what it does not know is pytest's to refuse
    refused = run(UNKNOWN)
    assert refused.returncode and f"usage: scripts/{name}" in refused.stderr, refused


def test_all_that_can_be_run_is_seen() -> None:
    seen = {*programs(python=True), *programs(python=False)}
    executable = {
        one.name for one in SCRIPTS.iterdir() if os.access(one, os.X_OK) and one.is_file()
    }
    assert executable <= seen and {"quickstart_client.py", "test"} <= seen
