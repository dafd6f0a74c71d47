"""A program twice as long takes twice the work, not four times: counted in function calls."""

from __future__ import annotations

import gc
import random
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import jserve.lang as sgl
from jserve.lang.backends.prefixes import Kept, Prefixes
from jserve.lang.roles import shared_length


def gens(s: Any, size: int) -> None:
    for i in range(size):
        s += f"Line {i}:" + sgl.gen("x", stop="\n")


def selects(s: Any, size: int) -> None:
    for _ in range(size):
        s += " " + sgl.select("x", ["word", "words"])


def roles(s: Any, size: int) -> None:
    for i in range(size // 2):
        s += sgl.user(f"Question {i}")
        s += sgl.assistant("An answer.")


def forks(s: Any, size: int) -> None:
    for _ in range(size // 4):
        branches = s.fork(2)
        branches += "Tip:" + sgl.gen("x")
        branches.join()


def run(program: sgl.SglFunction, size: int) -> None:
    backend = sgl.TestBackend({"x": "word"})
    try:
        state = program.run(size, backend=backend)
        assert state.error() is None and len(state.steps) >= size // 4
    finally:
        backend.shutdown()


def trace(program: sgl.SglFunction, size: int) -> None:
    assert len(program.trace(size=size).steps) >= size // 4


def calls_of(work: Callable[..., object], *arguments: Any) -> int:
    """Calls of functions, and goings-on of generators, in all threads that begin meanwhile."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize("work", [run, trace])
@pytest.mark.parametrize("function", [gens, selects, roles, forks])
def test_a_program_of_twice_the_size_takes_at_most_two_and_a_half_times_the_calls(
    function: Callable[..., None], work: Callable[..., None]
) -> None:
    program = sgl.function(function)
    calls_of(work, program, 8)  # what is imported and compiled once
    small, large = (calls_of(work, program, size) for size in (200, 400))
    assert small > 400 and large < 2.5 * small, f"{small=} {large=}"


def memory_of(work: Callable[[], object]) -> int:
    """Bytes that are held when it is done."""
    gc.collect()
    tracemalloc.start()
    try:
        held = work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        del held


def test_a_script_keeps_a_program_of_many_calls_once() -> None:
    @sgl.function
    def program(s: Any, size: int) -> None:
        for _ in range(size):
            s += "word " * 400 + sgl.gen("x", stop="\n")

    backend = sgl.TestBackend({"x": "word"})
    held = memory_of(lambda: program.run(200, backend=backend))
    assert held < 4_000_000, "each call keeps the whole text before it: 40 MB"
    texts = [call.text for call in backend.calls]
    part = "word " * 400 + "word"
    assert texts == [(part * i)[:-4] for i in range(1, 201)]
    assert backend.calls[1].text in repr(backend.calls[1])
    backend.shutdown()


def test_branches_that_are_read_share_the_text_before_them() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "word " * 100_000
        branches = s.fork(20)
        branches += lambda i: f"Branch {i}"
        assert all(one.text().endswith(f"word Branch {i}") for i, one in enumerate(branches))
        s.set_var("branches", branches)

    backend = sgl.TestBackend()
    held = memory_of(lambda: program.run(backend=backend))
    assert held < 3_000_000, "each branch holds a copy: 10 MB"
    backend.shutdown()


def test_prefixes_are_those_of_a_look_at_every_text() -> None:
    random.seed(1)
    prefixes, texts, kept = Prefixes(), list[str](), list[Kept]()
    for _ in range(500):
        text = "".join(random.choices("ab", k=random.randrange(9)))
        assert prefixes.longest(text) == max((shared_length(text, o) for o in texts), default=0)
        kept.append(prefixes.add(text))
        texts.append(text)
    assert [one.text for one in kept] == texts
    prefixes.clear()
    assert prefixes.longest("ab") == 0
