"""Compiling in worker processes: limits, caching, and what one bad grammar does to the others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import psutil
import pytest
from grammar_fake_work import VOCABULARY, scripted_work

from jserve.grammar.backend import GrammarError, GrammarUnavailable, Vocabulary
from jserve.grammar.compiler import CompilerLimits, GrammarCompiler
from jserve.grammar.regex_sets import category
from jserve.grammar.turns import NUM_EXTRA, SHORT, Turns
from jserve.types import CompiledSpec, GrammarSpec

Make = Callable[..., GrammarCompiler]
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""), 257, (256,))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[GrammarCompiler] = []

    def start(clock: Clock | None = None, **limits: float) -> GrammarCompiler:
        made.append(
            GrammarCompiler(
                "scripted",
                VOCABULARY,
                CompilerLimits(**limits),  # type: ignore[arg-type]
                work=scripted_work,
                clock=clock or time.monotonic,
            )
        )
        return made[-1]

    yield start
    for compiler in made:
        compiler.close()
    assert not children(), "a worker was left"


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            started = "spawn_main" in " ".join(child.cmdline())
            if started and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def error(
    future: concurrent.futures.Future[CompiledSpec], kind: type[GrammarError] = GrammarError
) -> str:
    with pytest.raises(GrammarError) as caught:
        future.result(60)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_worker_goes_on_after_an_ordinary_error(make: Make) -> None:
    compiler = make(max_workers=1)
    first = compiler.compile(spec("ok")).result(60)
    assert first.spec == spec("ok")
    assert error(compiler.compile(spec("bad bracket"))) == "bracket at position 3"
    assert compiler.compile(spec("ok 2")).result(60).payload == first.payload  # its process id
    assert (compiler.counts.compiled, compiler.counts.failed) == (2, 1)


def test_a_panic_and_a_crash_are_errors_that_name_them_and_cost_their_worker(make: Make) -> None:
    compiler = make(max_workers=1)
    first = compiler.compile(spec("ok")).result(60).payload
    assert error(compiler.compile(spec("panic"))) == (
        "the compiler failed: Panic: index out of bounds"
    )
    second = compiler.compile(spec("ok 2")).result(60).payload
    assert "ended its process" in error(compiler.compile(spec("die")))
    third = compiler.compile(spec("ok 3")).result(60).payload
    assert len({first, second, third}) == 3
    assert compiler.counts.crashes == 1


def test_an_idle_worker_that_died_is_replaced(make: Make) -> None:
    compiler = make(max_workers=1)
    process = int(compiler.compile(spec("ok")).result(60).payload)
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was starting is waited for
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)
    assert int(compiler.compile(spec("ok 2")).result(60).payload) != process
    assert compiler.counts.crashes == 0


def test_a_compilation_that_takes_too_long_is_killed(make: Make) -> None:
    compiler = make(seconds=0.5)
    start = time.monotonic()
    why = "within 0.5 seconds of a worker's time; make it smaller"
    assert why in error(compiler.compile(spec("sleep 60")))
    assert time.monotonic() - start < 30
    assert compiler.counts.timeouts == 1


def test_a_grammar_for_which_there_was_no_worker_may_be_tried_again_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make(max_workers=1)
    take = compiler._workers.take

    def none(kind: str) -> Any:
        monkeypatch.setattr(compiler._workers, "take", take)
        raise GrammarUnavailable("no worker process stays alive")

    monkeypatch.setattr(compiler._workers, "take", none)
    assert error(compiler.compile(spec("ok")), GrammarUnavailable)
    assert compiler.compile(spec("ok")).result(60).payload


def test_what_a_kind_needs_is_loaded_before_and_bounded_like_a_compilation(make: Make) -> None:
    compiler = make(seconds=0.5)
    start = time.monotonic()
    hung = GrammarSpec(kind="structural_tag", text="ok")
    why = "what compiles it was not loaded within 0.5 seconds; try again later"
    for _ in range(2):  # the second time it is known
        assert error(compiler.compile(hung), GrammarUnavailable) == why
    assert time.monotonic() - start < 30 and compiler.counts.timeouts == 1
    assert compiler.compile(spec("ok")).result(60).payload


def test_the_time_to_load_what_a_kind_needs_is_not_its_compilations(make: Make) -> None:
    compiler = make(seconds=30.0, crowded_seconds=0.5, max_workers=1)
    futures = [compiler.compile(GrammarSpec(kind="ebnf", text=f"ok {i}")) for i in range(4)]
    assert all(future.result(60).payload for future in futures)  # none gave way while it loaded
    assert compiler.counts.timeouts == 0


def test_a_kind_goes_to_a_worker_that_has_loaded_what_it_needs(make: Make) -> None:
    compiler = make()
    loaded = compiler.compile(GrammarSpec(kind="ebnf", text="ok")).result(60).payload
    for i in range(4):
        idle, deadline = compiler._workers._idle, time.monotonic() + 30
        while len(idle) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        idle.reverse()  # whoever comes next in line
        again = compiler.compile(GrammarSpec(kind="ebnf", text=f"ok {i}")).result(60)
        assert len(idle) >= 1 and again.payload == loaded


def test_hung_compilations_do_not_keep_the_next_one_waiting(make: Make) -> None:
    compiler = make(max_workers=8)
    compiler.compile(spec("ok")).result(60)
    hung = [compiler.compile(spec(f"sleep 60 {i}")) for i in range(5)]
    compiler.compile(spec("ok 2")).result(25)
    assert not any(future.done() for future in hung)
    assert compiler.counts.timeouts == 0


def test_many_small_grammars_at_once_go_to_warm_workers_instead_of_new_ones(make: Make) -> None:
    compiler = make(max_workers=16)
    compiler.compile(spec("ok")).result(60)
    futures = [compiler.compile(spec(f"ok {i}")) for i in range(64)]
    processes = {future.result(60).payload for future in futures}
    assert len(processes) <= 3, processes


def test_when_all_workers_hang_they_give_way_to_one_that_waits(make: Make) -> None:
    compiler = make(max_workers=2, crowded_seconds=0.5)
    hung = [compiler.compile(spec(f"sleep 600 {i}")) for i in range(2 + NUM_EXTRA)]
    compiler.compile(spec("ok")).result(60)
    why = error(next(one for one in hung if one.done()), GrammarUnavailable)
    assert "0.5 seconds of a worker's time; others wait" in why
    assert compiler.counts.timeouts >= 1


def long(text: str) -> GrammarSpec:
    return spec(f"{text} {'x' * SHORT}")


def test_a_short_text_does_not_wait_for_long_ones_that_run_nor_end_them(make: Make) -> None:
    compiler = make(max_workers=2, crowded_seconds=3.0)
    compiler.compile(spec("ok")).result(60)
    heavy = [compiler.compile(long(f"sleep 600 {i}")) for i in range(2)]
    time.sleep(1.0)
    compiler.compile(spec("ok 2")).result(2.0)
    assert not any(future.done() for future in heavy) and compiler.counts.timeouts == 0


def test_a_short_text_comes_before_long_ones_that_wait(make: Make) -> None:
    compiler = make(max_workers=1, crowded_seconds=1.0)
    heavy = [compiler.compile(long(f"sleep 600 {i}")) for i in range(4)]
    compiler.compile(spec("ok")).result(20)
    assert not all(future.done() for future in heavy)


def test_long_texts_wait_for_short_ones_that_came_later_for_some_seconds_only() -> None:
    clock = Clock()
    turns: Turns[str] = Turns(1, clock)
    turns.put("running", 1)
    turns.put("long", SHORT + 1)
    _, running = cast(Any, turns.take())
    turns.put("short", 1)
    assert turns.crowded and turns._due() is None
    clock.now += 0.6
    item, extra = cast(Any, turns.take())
    assert item == "short" and turns.crowded
    turns.put("short 2", 1)
    turns.put("short 3", 1)
    turns.give(extra)
    turns.give(running)
    item, running = cast(Any, turns.take())
    assert item == "short 2"
    clock.now += 5.0
    turns.give(running)
    assert [cast(Any, turns.take())[0], turns._due()] == ["long", None]
    clock.now += 0.6
    assert cast(Any, turns.take())[0] == "short 3" and not turns.crowded


def leave(compiler: GrammarCompiler, text: str, seconds: float) -> None:
    """Ask, and wait for so long."""
    future = compiler.compile(spec(text))
    time.sleep(seconds)
    compiler.leave(spec(text), future)


def test_grammars_that_nobody_waits_for_any_more_keep_none_waiting(make: Make) -> None:
    compiler = make(seconds=60, crowded_seconds=30, max_workers=1)
    compiler.compile(spec("warm")).result(60)
    long = "x" * SHORT
    for i in range(8):
        leave(compiler, f"sleep 60 {i} {long}", 0.5 if i == 0 else 0.0)  # the first one runs
    started = time.monotonic()
    compiler.compile(spec(f"next {long}")).result(60)
    assert time.monotonic() - started < 10
    assert compiler.counts.abandoned == 8 and compiler.counts.timeouts == 0
    assert not compiler._open


def test_an_abandoned_grammar_that_is_in_nobodys_way_is_compiled_for_the_next_one(
    make: Make,
) -> None:
    compiler = make()
    compiler.compile(spec("warm")).result(60)
    leave(compiler, "sleep 0.7", 0.3)
    assert compiler.known(spec("sleep 0.7")) is None
    again = compiler.compile(spec("sleep 0.7"))
    assert again.result(60).payload and compiler.counts.compiled == 2
    assert compiler.counts.abandoned == 0


def test_a_grammar_is_abandoned_only_when_the_last_who_waits_has_left(make: Make) -> None:
    compiler = make(seconds=60, crowded_seconds=60, max_workers=1)
    compiler.compile(spec("warm")).result(60)
    long = "x" * SHORT
    first = compiler.compile(spec(f"sleep 0.5 first {long}"))
    queued = [compiler.compile(spec(f"queued {long}")) for _ in range(3)]
    time.sleep(0.2)  # the first one runs, beside one that waits
    for one in queued[:2]:
        compiler.leave(spec(f"queued {long}"), one)
    stranger = concurrent.futures.Future[CompiledSpec]()
    compiler.leave(spec(f"queued {long}"), stranger)  # an earlier use of the same text
    assert first.result(60).payload and queued[2].result(60).payload
    assert compiler.counts.abandoned == 0
    compiler.leave(spec(f"queued {long}"), queued[2])  # over already: nothing happens
    assert compiler.known(spec(f"queued {long}")) is not None


def test_what_is_taken_back_lets_as_many_go_as_took() -> None:
    turns: Turns[str] = Turns(1)
    turns.put("short", 1)
    turns.put("long", SHORT + 1)
    turns.put("last", SHORT + 2)
    assert turns.take_back("long") and not turns.take_back("long")
    assert turns.take_back("short") and not turns.take_back("never put")
    taken = [turns.take() for _ in range(3)]
    assert [one and one[0] for one in taken] == ["last", None, None]


def test_identical_grammars_in_flight_compile_once(make: Make) -> None:
    compiler = make()
    futures = [compiler.compile(spec("sleep 0.5")) for _ in range(8)]
    assert len({id(future.result(60)) for future in futures}) == 1
    assert compiler.compile(spec("sleep 0.5")).result(0) is futures[0].result()
    assert (compiler.counts.compiled, compiler.counts.cache_hits) == (1, 1)


def test_the_cache_is_bounded_by_bytes_and_drops_the_oldest(make: Make) -> None:
    compiler = make(cache_bytes=2500)
    for text in ("bytes 1000", "bytes 1001", "bytes 1000", "bytes 1002"):
        compiler.compile(spec(text)).result(60)
    assert compiler.counts.cache_hits == 1
    compiler.compile(spec("bytes 1000")).result(60)
    assert compiler.counts.cache_hits == 2
    compiler.compile(spec("bytes 1001")).result(60)
    assert (compiler.counts.cache_hits, compiler.counts.compiled) == (2, 4)
    compiler.flush()
    compiler.compile(spec("bytes 1000")).result(60)
    assert compiler.counts.compiled == 5


def test_errors_are_remembered_for_good_and_timeouts_for_a_minute(make: Make) -> None:
    clock = Clock()
    compiler = make(clock, seconds=0.3)
    for _ in range(2):
        assert "bracket" in error(compiler.compile(spec("bad bracket")))
        assert "within" in error(compiler.compile(spec("sleep 60")))
    assert (compiler.counts.failed, compiler.counts.cache_hits) == (2, 2)
    clock.now += 61.0
    assert "bracket" in error(compiler.compile(spec("bad bracket")))
    assert "within" in error(compiler.compile(spec("sleep 60")))
    assert (compiler.counts.failed, compiler.counts.cache_hits) == (3, 3)


def test_a_worker_that_kept_much_memory_is_not_used_again(make: Make) -> None:
    compiler = make(memory_mb=400, max_workers=1)
    first = compiler.compile(spec("keep 150")).result(60).payload
    assert compiler.compile(spec("ok")).result(60).payload != first


def test_memory_beyond_the_limit_is_an_error_that_says_so(make: Make) -> None:
    compiler = make(memory_mb=300)
    assert "needs more than 300 MB; make it" in error(compiler.compile(spec("keep 1000")))
    compiler.compile(spec("ok")).result(60)


def test_a_nul_byte_is_refused_before_any_worker_sees_it(make: Make) -> None:
    compiler = make()
    assert error(compiler.compile(spec("ab\0c"))) == "it has a NUL byte at position 2"


def test_close_ends_hung_compilations_and_leaves_no_process(make: Make) -> None:
    compiler = make(max_workers=2)
    futures = [compiler.compile(spec(f"sleep 600 {i}")) for i in range(4)]
    while len(children()) < 2:
        time.sleep(0.01)
    compiler.close()
    for future in futures:
        with pytest.raises(GrammarError):
            future.result(60)
    assert not children()


def test_spare_workers_are_ready_beforehand_and_few_are_kept(make: Make) -> None:
    compiler = make(max_workers=6)
    futures = [compiler.compile(spec(f"sleep 0.5 {i}")) for i in range(6)]
    concurrent.futures.wait(futures, 60)
    deadline = time.monotonic() + 30
    while len(children()) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert 1 <= len(children()) <= 2


def letters() -> str:
    """Words of any letters; takes 740 MB."""
    ranges = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in category("L"))
    return f'root ::= ([{ranges}]{{1,50}} " "){{1,2}}'


def test_a_grammar_beyond_the_memory_limit_fails_alone() -> None:
    compiler = GrammarCompiler("xgrammar", BYTES, CompilerLimits(seconds=120.0, memory_mb=100))
    try:
        future = compiler.compile(GrammarSpec(kind="ebnf", text=letters()))
        assert compiler.compile(spec("[a-z]{3}")).result(120).payload
        assert "100 MB" in error(future)
        assert compiler.counts.timeouts == 0
    finally:
        compiler.close()
    assert not children()
