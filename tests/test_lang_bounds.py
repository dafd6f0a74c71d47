"""Programs that catch what ends their trace: tracing ends all the same, and the batch is run."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest

import jserve.lang as sgl
from jserve.__main__ import main
from jserve.lang import bounds, ir, tracing
from jserve.lang.bounds import MOST_SWALLOWED

pytestmark = pytest.mark.timeout(30)

INTRODUCTION = "An introduction that all runs share, longer than sixty-four characters. "


@pytest.fixture
def backend():
    one = sgl.TestBackend({"x": "1"})
    yield one
    one.shutdown()


def commits(backend):
    return [call.text for call in backend.calls if call.kind == "commit"]


def test_a_program_that_tries_again_after_any_error_shares_its_prefix_and_ends(backend):
    entered = []

    @sgl.function
    def program(s, q):
        s += INTRODUCTION
        while True:
            try:
                entered.append(q)
                s += "Q: " + q + sgl.gen("x")
                json.loads(s["x"])
                break
            except Exception:
                continue

    states = program.run_batch([("a",), ("b",)], backend=backend)
    assert [state["x"] for state in states] == ["1", "1"]
    assert commits(backend) == [INTRODUCTION + "Q: "]
    assert len(entered) == 3  # the trace tried once


def test_a_program_that_catches_everything_is_left_behind_and_shares_nothing(backend):
    entered = []

    @sgl.function
    def program(s, q):
        s += INTRODUCTION
        while True:
            try:
                entered.append(q)
                s += q + sgl.gen("x")
                json.loads(s["x"])
                break
            except:  # noqa: E722
                continue

    states = program.run_batch([("a",), ("b",)], backend=backend)
    assert [state["x"] for state in states] == ["1", "1"]
    assert commits(backend) == []
    assert len(entered) == 2 + MOST_SWALLOWED + 2


def test_every_operation_behind_the_stop_raises_it_again(backend):
    caught = []

    @sgl.function
    def program(s, q):
        s += INTRODUCTION + q
        return s.text()

    @sgl.function
    def stubborn(s, q):
        tries = [
            lambda: s.__iadd__(INTRODUCTION + q),
            lambda: s.user("x"),
            lambda: s.fork(2),
            lambda: s["x"],
            lambda: s.text(),
            lambda: s.set_var("y", 1),
            lambda: "x" in s,
            lambda: s.sync(),
            lambda: program(q),
        ]
        for number, one in enumerate(tries):
            try:
                one()
            except BaseException as error:
                caught.append((number, type(error)))
                assert not isinstance(error, Exception)

    prefix = tracing.trace(stubborn.func, {"q": ir.Argument("q")}, backend, True).prefix
    assert prefix == INTRODUCTION
    assert [number for number, _ in caught] == list(range(9))


def test_text_that_a_program_repeats_for_want_of_a_value_is_no_prefix(backend):
    @sgl.function
    def program(s, number):
        while True:
            try:
                int(number)
                break
            except Exception:
                s += INTRODUCTION
        s += "q" + sgl.gen("x")

    states = program.run_batch([("1",), ("2",)], backend=backend)
    assert [state["x"] for state in states] == ["1", "1"]
    assert commits(backend) == []


RETRY = """
import json
import jserve.lang as sgl

@sgl.function
def stubborn(s, q):
    s += "Q: " + q
    while True:
        try:
            s += sgl.gen("x")
            json.loads(s["x"])
            break
        except {caught}:
            s += "again"
"""


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
def test_the_picture_of_a_program_that_tries_again_says_that_it_did_not_end(
    tmp_path, capsys, caught
):
    path = tmp_path / "p.py"
    path.write_text(RETRY.format(caught=caught))
    assert main(["lang", "explain", str(path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].startswith("├═ text     'Q: '") and "argument q" in rows[2]
    assert "end      the program did not end while traced: it did 1,000 things" in rows[-2], rows
    assert len(rows) < tracing.MOST_SHOWN


def test_a_failed_branch_is_an_ordinary_error_that_a_program_may_catch():
    backend = sgl.TestBackend({"x": ValueError("no luck"), "y": "Y"})

    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += sgl.gen("x")
        branches.join()
        try:
            _ = s["x"]
        except Exception as error:
            assert isinstance(error, sgl.ProgramError)
            s += "instead: " + sgl.gen("y")

    with pytest.warns(sgl.ProgramWarning):
        assert program.run(backend=backend)["y"] == "Y"
    backend.shutdown()


def test_what_ends_a_trace_otherwise_comes_through(backend):
    @sgl.function
    def leaves(s):
        raise SystemExit(3)

    @sgl.function
    def fails(s):
        s += "text"
        raise LookupError("no luck")

    with pytest.raises(SystemExit):
        leaves.trace(backend=backend)
    steps = fails.trace(backend=backend).steps
    assert [(step.kind, step.text) for step in steps] == [
        ("text", "text"),
        ("end", "LookupError: no luck"),
    ]
    assert steps[1].site.function == "fails"


# Programs that never come back to their state.


def endless(s, q):
    s += INTRODUCTION + q
    while True:
        pass


def endless_from_the_start(s, q):
    s += INTRODUCTION
    while True:
        pass


def endless_in_a_try(s, q):
    s += INTRODUCTION
    while True:
        with contextlib.suppress(Exception):
            int(q)


def endless_in_a_branch(s, q):
    branches = s.fork(2)
    branches += lambda i: "x" if i == 0 else endless(s, q)


@pytest.mark.parametrize(
    "function", [endless, endless_from_the_start, endless_in_a_try, endless_in_a_branch]
)
def test_a_program_that_never_comes_back_to_its_state_is_interrupted(function, monkeypatch):
    monkeypatch.setattr(tracing, "MOST_SECONDS", 0.1)
    before = set(threading.enumerate())
    trace = sgl.function(function).trace()
    assert trace.steps[-1].kind == "end"
    assert "did not end while traced: it took longer than 0.1 s" in trace.steps[-1].text
    assert trace.prefix == (INTRODUCTION if function is endless else "")
    assert set(threading.enumerate()) <= before


def test_interrupts_that_come_again_while_one_is_told_leave_nothing_hanging(monkeypatch):
    monkeypatch.setattr(bounds, "_GRACE", 0.0)
    monkeypatch.setattr(bounds, "_INTERRUPTS", 100_000)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ended = []

    def interrupt_many() -> None:
        for _ in range(20):
            one = bounds.Bounds(10, 0.001)
            one.run(endless_loop)
            ended.append(one.why)

    waiter = threading.Thread(target=interrupt_many, daemon=True)
    waiter.start()
    waiter.join(30)
    assert ended == ["it took longer than 0.001 s"] * 20


def endless_loop():
    while True:
        pass


def waits(goes_on, caught):
    goes_on.wait(30)


def catches(goes_on, caught):
    while True:
        try:
            while not goes_on.is_set():
                pass
            return
        except:  # noqa: E722
            caught.append("it")


@pytest.mark.parametrize("holds", [waits, catches])
def test_one_that_cannot_be_interrupted_is_left_behind_and_does_nothing_more(
    monkeypatch, backend, holds
):
    monkeypatch.setattr(tracing, "MOST_SECONDS", 0.1)
    goes_on, caught, reached = threading.Event(), [], []
    before = set(threading.enumerate())

    @sgl.function
    def program(s, q):
        s += INTRODUCTION
        holds(goes_on, caught)
        s += "more"
        reached.append(q)

    trace = program.trace(backend=backend)
    (thread,) = [one for one in set(threading.enumerate()) - before if "trace" in one.name]
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive() and not reached and bool(caught) is (holds is catches)
    assert [step.kind for step in trace.steps] == ["text", "end"] and trace.prefix == ""


def test_a_batch_of_a_program_that_is_slow_to_trace_is_run(monkeypatch, backend):
    monkeypatch.setattr(tracing, "MOST_SECONDS", 0.1)

    @sgl.function
    def program(s, number):
        s += INTRODUCTION
        while not isinstance(number, int):
            pass
        s += f"{number}" + sgl.gen("x")

    states = program.run_batch([(1,), (2,)], backend=backend)
    assert [state["x"] for state in states] == ["1", "1"] and commits(backend) == []
