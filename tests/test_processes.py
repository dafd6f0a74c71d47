"""Processes that jserve starts never run the program that starts them, however that was started."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import types
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from jserve.engine.engine import Engine
from jserve.engine.process import EngineProcess
from jserve.errors import ConfigError
from jserve.processes import start_process

ROOT = Path(__file__).resolve().parent.parent

#: Without a guard: run again in a child, it would print again, and start processes of its own.
SCRIPT = """
print("main", flush=True)
from fake_engine import ByteTokenizer
from jserve.engine.engine import Engine
with Engine("fake", builder="fake_engine:build", tokenizer=ByteTokenizer()) as engine:
    assert engine.server_info["pid"] != __import__("os").getpid()
    assert len(engine.generate("a", {"max_new_tokens": 2})["output_ids"]) == 2
from jserve.grammar.workers import Workers
from grammar_fake_work import VOCABULARY, scripted_work
workers = Workers(scripted_work, ("scripted", VOCABULARY, 256), 1)
worker = workers.take("regex")
workers.give(worker, True)
workers.close()
print("served", flush=True)
"""
WAYS = ("file", "stdin", "module", "package")


def run(way: str, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """`text` as a Python program; in `folder`, where it is a file."""
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("script", "__main__"):
        (package / f"{name}.py").write_text(text)
    words = {
        "file": [str(package / "script.py")],
        "stdin": ["-"],
        "module": ["-m", "mine.script"],
        "package": ["-m", "mine"],
    }[way]
    path = os.pathsep.join((str(folder), str(ROOT), str(ROOT / "tests")))
    return subprocess.run(
        [sys.executable, *words],
        input=text if way == "stdin" else "",
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_a_guard_runs_once_however_it_is_started(
    way: str, tmp_path: Path
) -> None:
    done = run(way, tmp_path, SCRIPT)
    assert (done.returncode, done.stdout) == (0, "main\nserved\n"), done.stderr[-3000:]
    assert not done.stderr


def say_main(pipe: Connection) -> None:
    pipe.send(vars(sys.modules["__main__"]).get("__file__"))


def test_a_process_knows_no_main_file_and_the_caller_keeps_his(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    near, far = multiprocessing.Pipe()
    process = start_process(say_main, (far,), "test")
    assert sys.modules["__main__"] is main
    assert near.poll(60) and near.recv() is None
    process.join(10)
    assert process.exitcode == 0


def test_other_threads_find_the_main_module_while_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    main.__file__, main.__dict__["mine"] = __file__, 5
    monkeypatch.setitem(sys.modules, "__main__", main)
    seen: list[tuple[bool, int, str | None]] = []

    def look() -> None:
        now = sys.modules["__main__"]
        seen.append((now is main, now.mine, now.__file__))  # pyright: ignore

    def slow(self: SpawnProcess) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    monkeypatch.setattr(SpawnProcess, "start", slow)
    start_process(say_main, (), "test")
    assert seen == [(False, 5, __file__)] and sys.modules["__main__"] is main


def test_what_lives_in_the_main_file_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Mine(str):
        pass

    def work() -> None:
        raise AssertionError("never runs")

    monkeypatch.setattr(Mine, "__module__", "__main__")
    work.__module__ = "__main__"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for target, arguments in ((say_main, ([{"a": Mine("b")}],)), (work, ())):
        with pytest.raises(ConfigError, match=r"(Mine|work): it is defined in __main__"):
            start_process(target, arguments, "test")
    with pytest.raises(ConfigError, match="builder must name a module"):
        Engine(model_path="fake", builder="__main__:build")
    config = Mine("config")
    with pytest.raises(ConfigError, match="Mine: it is defined in __main__"):
        EngineProcess(config, "fake_engine:build")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


FORKING = """
import os, sys, time
from jserve.processes import start_process
process = start_process(time.sleep, (60,), "sleeper")
child = os.fork()
if child == 0:
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
time.sleep(0.2)
print(process.is_alive())
process.kill()
process.join()
print(process.exitcode)
"""


def test_the_end_of_a_forked_process_leaves_what_was_started_alone_and_says_nothing(
    tmp_path: Path,
) -> None:
    done = run("file", tmp_path, FORKING)
    assert done.stdout.split() == ["0", "True", "-9"] and done.stderr == ""
