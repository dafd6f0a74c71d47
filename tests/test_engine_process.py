"""Two processes: what one does when the other dies, hangs, fails to start or is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import continuation
from test_engine import collect, request, start

from jserve.engine.engine import Engine
from jserve.errors import EngineDeadError, RequestError, WeightError

ROOT = Path(__file__).resolve().parent.parent


def ends(pid: int, seconds: float) -> bool:
    """Whether a process that may be another's child ends in time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + seconds
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


async def fails(engine: Engine, after: float, action: Any) -> tuple[str, float]:
    """The error of a request that is open when `action` happens, and how long it took to come."""
    task = asyncio.create_task(collect(engine, request(max_new_tokens=400)))
    await asyncio.sleep(after)
    assert not task.done()
    started = time.monotonic()
    action()
    with pytest.raises(EngineDeadError) as caught:
        await asyncio.wait_for(task, 5)
    return str(caught.value), time.monotonic() - started


def test_a_killed_engine_process_fails_every_open_request_within_two_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with start(inline=False) as engine:
        pid = engine.server_info["pid"]
        assert pid != os.getpid()
        body = engine.generate("hello", {"max_new_tokens": 12})
        assert body["output_ids"] == continuation(list(b"hello"), 12)
        assert engine.flush_cache() and engine.get_server_info()["context_length"] == 512
        (directory,) = tmp_path.glob("jserve-*")
        assert directory.stat().st_mode & 0o077 == 0

        message, seconds = asyncio.run(fails(engine, 0.1, lambda: os.kill(pid, signal.SIGKILL)))
        assert seconds < 2 and "exit code -9" in message
        assert not engine.healthy
        for call in (lambda: engine.generate("a"), engine.flush_cache, engine.get_server_info):
            with pytest.raises(EngineDeadError, match="exit code -9"):
                call()
    assert not directory.exists()


def test_a_second_device_failure_fails_open_requests_with_what_the_engine_said() -> None:
    with start("build_dying", inline=False) as engine:
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="scripted failure of launch"):
            engine.generate("hello", {"max_new_tokens": 400})
        assert time.monotonic() - started < 2 and not engine.healthy


@pytest.mark.parametrize("inline", [False, True])
def test_a_step_that_hangs_fails_open_requests(inline: bool) -> None:
    with start("build_hanging", inline=inline) as engine:
        with pytest.raises(EngineDeadError, match="hangs"):
            engine.generate("hello", {"max_new_tokens": 4})
        assert not engine.healthy


def test_a_call_during_or_after_shutdown_fails_and_never_hangs() -> None:
    engine = start(inline=False)
    engine.generate("a", {"max_new_tokens": 2})  # the background loop runs
    stream = engine.generate("a", {"max_new_tokens": 400}, stream=True)
    next(stream)
    threading.Timer(0.2, engine.shutdown).start()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate("a", {"max_new_tokens": 400})
    with pytest.raises(EngineDeadError, match="shut down"):
        list(stream)
    for call in (engine.flush_cache, engine.get_server_info, lambda: engine.generate("a")):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_shutdown_ends_the_process_and_fails_what_is_open() -> None:
    engine = start(inline=False)
    pid = engine.server_info["pid"]
    closing = threading.Thread(target=engine.shutdown)
    message, seconds = asyncio.run(fails(engine, 0.1, closing.start))
    assert "shut down" in message and seconds < 2
    closing.join(10)
    assert ends(pid, 1.0)
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate("a")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_engine_process_leaves_it_to_the_api_process_when_to_end(number: int) -> None:
    with start(inline=False) as engine:
        pid = engine.server_info["pid"]
        threading.Timer(0.1, os.kill, (pid, number)).start()
        assert len(engine.generate("hello", {"max_new_tokens": 400})["output_ids"]) == 400
        assert engine.healthy
    assert ends(pid, 1.0)


def test_calls_with_arguments_of_other_types_are_refused_and_the_engine_lives() -> None:
    with start(inline=False) as engine:
        for rid in (5, ["a"], b"a", None):
            with pytest.raises(RequestError, match="rid must be a string"):
                engine.abort(rid)  # type: ignore[arg-type]
        for mode in (None, ["abort"], {}):
            with pytest.raises(RequestError, match="mode must be a string"):
                engine.pause_generation(mode)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="mode"):
            engine.pause_generation(7)  # type: ignore[arg-type]
        assert len(engine.generate("a", {"max_new_tokens": 4})["output_ids"]) == 4


def test_an_engine_process_that_cannot_start_is_one_clear_error() -> None:
    with pytest.raises(WeightError, match="tensor lm_head"):
        start("build_refused", inline=False)
    with pytest.raises(EngineDeadError, match="exit code 7"):
        start("build_exiting", inline=False)


SCRIPT = """
import os, sys, time
sys.path.insert(0, "tests")
if __name__ == "__main__":
    from test_engine import start
    engine = start(inline=False)
    print(engine.server_info["pid"], flush=True)
    {then}
"""


def run_script(then: str, tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(then=then))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_killed_api_process_ends_the_engine_process_with_a_message(tmp_path: Path) -> None:
    process, pid = run_script("time.sleep(60)", tmp_path)
    process.kill()
    assert ends(pid, 2.0)
    _, errors = process.communicate(timeout=5)
    assert "API process ended" in errors


def test_ctrl_c_and_a_plain_exit_leave_no_engine_process(tmp_path: Path) -> None:
    endless = "while True: engine.generate('a', {'max_new_tokens': 500})"
    process, pid = run_script(endless, tmp_path)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert ends(pid, 1.0)
    assert "KeyboardInterrupt" in errors and "API process ended" not in errors
    process, pid = run_script("pass", tmp_path)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0 and not errors
    assert ends(pid, 1.0)
