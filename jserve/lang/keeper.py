"""Keeps a server only as long as who asked for it lives.

Run as a file of its own, beside the caller: `python -I keeper.py folder seconds command…`. Its
standard input is a pipe that the caller holds open and never writes to. When that ends, because the
caller is no more, however it ended, or at SIGTERM, `folder` is removed and the command is asked to
end, after `seconds` made to. Ends with the command's exit code. Imports nothing of jserve, and
knows nothing of what the command is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path


def command_of(folder: str, seconds: float, command: list[str]) -> list[str]:
    """What runs `command` kept. It has to lead a process group of its own, which ends with it."""
    return [sys.executable, "-I", str(Path(__file__)), folder, f"{seconds:g}", *command]


def keep(folder: str, seconds: float, command: list[str]) -> int:
    """The command's exit code, when it has ended; 128 and the signal's number if that ended it."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as kept:
        for work, inputs in ((_watch, (asked,)), (_end, (asked, kept, folder, seconds))):
            threading.Thread(target=work, args=inputs, daemon=True).start()
        code = kept.wait()
    return code if code >= 0 else 128 - code


def _watch(asked: threading.Event) -> None:
    os.read(sys.stdin.fileno(), 1)  # until nobody holds the other end
    asked.set()


def _end(
    asked: threading.Event, kept: subprocess.Popen[bytes], folder: str, seconds: float
) -> None:
    asked.wait()
    shutil.rmtree(folder, ignore_errors=True)
    kept.terminate()
    try:
        kept.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # what it has started too, and this process


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
