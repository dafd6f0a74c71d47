"""Ends that nobody asked for: streams that are still held, collected or left when a program, a
thread or an event loop ends, forked processes, and questions that cannot be answered.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_engine import continuation, make_scheduler
from test_engine import request, start
from test_loop import Rig

from jserve.config import Config
from jserve.engine.grammar_gate import GrammarGate
from jserve.engine.grammar_queue import GrammarQueue
from jserve.engine.life import FORKED
from jserve.engine.local import local_ends
from jserve.engine.process import EngineThread
from jserve.grammar.templates import Templates
from jserve.types import (
    CompiledSpec,
    Control,
    ControlReply,
    Deltas,
    GrammarSpec,
    Progress,
    SamplingParams,
    Submit,
)

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import asyncio, atexit, os, sys
sys.path.insert(0, "tests")
from test_engine import request, start
from jserve.errors import EngineDeadError

def held(engine):
    global stream
    stream = engine.generate("hello", {"max_new_tokens": 400}, stream=True)
    next(stream)

def held_after_shutdown(engine):
    held(engine)
    engine.shutdown()

def raised(engine):
    for _ in engine.generate("hello", {"max_new_tokens": 400}, stream=True):
        raise ValueError("scripted")

async def one(engine):
    async for _ in await engine.async_generate("hello", {"max_new_tokens": 400}, stream=True):
        break

def left(engine):
    asyncio.run(one(engine))
    assert not engine._client.left and not engine._client.routes

def forked(engine):
    stream = engine.generate("hello", {"max_new_tokens": 40}, stream=True)
    next(stream)
    child = os.fork()
    if child == 0:
        for call in (lambda: engine.generate("a"), engine.flush_cache, lambda: next(stream),
                     lambda: engine.abort("a"), lambda: asyncio.run(one(engine))):
            try:
                call()
                os._exit(3)
            except EngineDeadError as error:
                assert "forked" in str(error), error
        engine.shutdown()
        del stream
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(stream)[-1]["output_ids"]) == 40
    assert len(engine.generate("a", {"max_new_tokens": 4})["output_ids"]) == 4

def late():
    try:
        engine.generate("a")
    except EngineDeadError as error:
        print(error)

if __name__ == "__main__":
    atexit.register(late)
    engine = start(inline=sys.argv[2] == "inline")
    print(len(engine.generate("a", {"max_new_tokens": 4})["output_ids"]), flush=True)
    globals()[sys.argv[1]](engine)
    print("end of script", flush=True)
"""


FORKING = "ignore:This process:DeprecationWarning"  # Python 3.12 and newer warn beside threads
LATE = "the program is ending\n"  # an atexit handler that was there before the engine


def ended(what: str, where: str, tmp_path: Path) -> tuple[str, str]:
    """What a script says that ends so, on both streams; it may not hang."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", FORKING, str(script), what, where],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("what", ["held", "held_after_shutdown", "raised", "left"])
def test_a_program_ends_with_a_stream_that_it_holds_or_has_left_and_says_nothing(
    what: str, tmp_path: Path
) -> None:
    said, complained = ended(what, "inline", tmp_path)
    if what == "raised":
        assert said == "4\n" + LATE and complained.splitlines()[-1] == "ValueError: scripted"
        assert complained.count("Traceback") == 1 and "Exception ignored" not in complained
    else:
        assert said == "4\nend of script\n" + LATE and complained == ""


def test_a_forked_process_neither_uses_nor_ends_the_engine(tmp_path: Path) -> None:
    said, complained = ended("forked", "process", tmp_path)
    assert said == f"4\n{FORKED}\nend of script\n{LATE}", complained
    assert complained == ""


def test_a_stream_that_is_collected_in_the_loops_own_thread_is_closed_and_blocks_nothing() -> None:
    class Holder:
        stream: Any
        me: Any

    with start() as engine:
        gc.disable()
        try:
            holder = Holder()
            holder.me = holder
            holder.stream = engine.generate("hello", {"max_new_tokens": 400}, stream=True)
            rid = next(holder.stream)["meta_info"]["id"]
            del holder
            assert rid in engine._client.routes
            loop = engine._background._loop
            assert loop is not None
            loop.call_soon_threadsafe(gc.collect)
            bodies: list[Any] = []
            call = lambda: bodies.append(engine.generate("a", {"max_new_tokens": 4}))  # noqa: E731
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(10)
        finally:
            gc.enable()
        assert [len(body["output_ids"]) for body in bodies] == [4], "a later call hangs"
        assert rid not in engine._client.routes


def test_an_event_loop_that_ends_with_an_open_stream_leaves_no_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def leave(engine: Any) -> None:
        outputs = engine.generate_stream(request(max_new_tokens=400))
        await anext(outputs)
        engine.held = outputs  # asyncio.run closes it once all tasks are over

    with start() as engine:
        asyncio.run(leave(engine))
        gc.collect()
        assert not engine._client.left and not engine._client.routes
        assert not caplog.records, caplog.text
        assert len(engine.generate("a", {"max_new_tokens": 4})["output_ids"]) == 4


def test_questions_that_cannot_be_answered_are_their_own_failures_and_never_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler()
    monkeypatch.setattr(scheduler, "resume", broken)
    rig = Rig(scheduler=scheduler)
    rig.submit("a", [1] * 20, 40)
    rig.tick(3)
    asked = {
        "unknown": ("no_such", {}),
        "flush": ("flush_cache", {"timeout": 5}),
        "info": ("server_info", {"": 1}),
        "pause": ("pause_generation", {"mode": "in_place", "seconds": 1}),
        "type": ("pause_generation", {"mode": 7}),
        "stop": ("shutdown", {"now": True}),
        "self": ("may_flush", {"self": 1}),
        "broken": ("continue_generation", {}),
    }
    for id, (op, args) in asked.items():
        rig.api.send(Control(id=id, op=op, args=args))
    rig.tick(3)
    rig.run_until_finished("a")
    assert rig.tokens("a") == continuation([1] * 20, 40)
    replies = {m.id: m for m in rig.other if isinstance(m, ControlReply)}
    assert replies.keys() == asked.keys() and not any(one.ok for one in replies.values())
    assert "timeout" in replies["flush"].message and "flush_cache" in replies["unknown"].message
    assert "scripted" in replies["broken"].message
    assert rig.runner.events.count(("reset", -1)) == 0


def test_a_grammar_that_cannot_be_loaded_is_its_requests_failure_and_never_the_loops() -> None:
    class Broken(Templates):
        def share(self, compiled: CompiledSpec) -> Any:
            raise RuntimeError("cannot schedule new futures after shutdown")

    api, engine_end = local_ends()
    templates = Broken(lambda: None)  # type: ignore[arg-type, return-value]
    gate = GrammarGate(engine_end, GrammarQueue(templates, lambda: False))
    spec = CompiledSpec(spec=GrammarSpec(kind="regex", text="a"), payload=b"")
    params = SamplingParams(max_new_tokens=2)
    api.send(Submit(rid="a", prompt_ids=[1], sampling=params, grammar=spec))
    api.send(Submit(rid="b", prompt_ids=[1], sampling=params))
    assert [message.rid for message in gate.drain() if isinstance(message, Submit)] == ["b"]
    (told,) = api.drain()
    assert isinstance(told, Deltas) and told.items[0].finish is not None
    assert told.items[0].rid == "a" and "schedule" in (told.items[0].finish.message or "")
    templates.close()


def broken() -> None:
    raise AssertionError("scripted")


RELEASED = threading.Event()


def build_failing_late(config: Config, channel: Any) -> Any:
    assert RELEASED.wait(10)
    raise RuntimeError("cannot schedule new futures after interpreter shutdown")


@pytest.mark.parametrize("left", [True, False])
def test_a_start_that_was_interrupted_and_then_fails_complains_to_nobody(
    left: bool, caplog: pytest.LogCaptureFixture
) -> None:
    RELEASED.clear()
    worker = EngineThread(Config.from_flags(model_path="fake"), f"{__name__}:build_failing_late")
    if left:
        worker.stop(0.0)
        assert worker.alive()
    RELEASED.set()
    while worker.alive():
        threading.Event().wait(0.01)
    assert [record.levelname for record in caplog.records] == ([] if left else ["CRITICAL"])
    (failed,) = worker.channel.drain()
    assert isinstance(failed, Progress) and failed.stage == "failed"
