"""Every command of the README runs: by CI (fences tagged `ci`), or here against the real engine.

Tags: `server` is the command that `client` fences talk to; `run` fences stand alone.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import server_process

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PORT = "30000"  # the port of README's commands; tests use a free one


@dataclasses.dataclass(frozen=True)
class Fence:
    language: str
    tag: str
    text: str


def fences(*tags: str) -> list[Fence]:
    found = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Fence(*parts) for parts in found if not tags or parts[1] in tags]


def run(fence: Fence, folder: Path, port: int | None = None) -> str:
    """Run one fence as a reader would, in an empty folder, with this environment's programs."""
    text = fence.text if port is None else fence.text.replace(PORT, str(port))
    script = folder / f"readme.{fence.language}"
    script.write_text(text)
    interpreter = [sys.executable] if fence.language == "python" else ["bash", "-euo", "pipefail"]
    programs = Path(sys.executable).parent
    env = dict(
        os.environ,
        PATH=f"{programs}:{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        XLA_FLAGS="",
    )
    done = subprocess.run(
        [*interpreter, str(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{fence.text}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_fence_says_who_runs_it() -> None:
    assert {fence.language for fence in fences()} == {"bash", "python"}
    assert [fence for fence in fences() if fence.tag not in ("ci", "server", "client", "run")] == []
    assert README.count("```") == 2 * len(fences())


def test_ci_runs_the_commands_tagged_for_it() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if not line.startswith(("#", "step "))]
    for fence in fences("ci"):
        for line in fence.text.splitlines():
            command = re.compile(rf"(^|\s){re.escape(line.partition('#')[0].strip())}\b")
            assert any(map(command.search, lines)), line


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"`([\w.]+/[\w./]*|\w+\.py)`", README))
    assert {"jserve/server", "scripts/check", ".ci/run"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_its_map_has_every_room() -> None:
    rooms = [path for path in (ROOT / "jserve").iterdir() if not path.name.startswith(("_", "py."))]
    assert len(rooms) > 15
    wanted = [f"jserve/{path.name}" for path in rooms] + ["pallas_kernels", "sharding", "configs"]
    table = README.partition("## Map")[2].partition("To follow")[0]
    assert [name for name in wanted if f"`{name}`" not in table] == []


@pytest.mark.full
def test_the_server_and_client_commands_work(tmp_path: Path) -> None:
    (server,) = fences("server")
    words = server.text.split()
    assert words[:2] == ["jserve", "serve"]
    with server_process.serving(*words[2:]) as client:
        answers = [run(fence, tmp_path, client.base_url.port) for fence in fences("client")]
    assert len(answers) == 2
    assert all("Paris" in answer for answer in answers)
    assert answers[0].count('"text"') == 1  # the native route answered too


@pytest.mark.full
@pytest.mark.parametrize("number", range(2))
def test_the_commands_that_stand_alone_work(number: int, tmp_path: Path) -> None:
    assert shutil.which("jserve", path=str(Path(sys.executable).parent)), "jserve is not installed"
    standing = fences("run")
    assert len(standing) == 2
    answer = run(standing[number], tmp_path)
    assert "Paris" in answer
