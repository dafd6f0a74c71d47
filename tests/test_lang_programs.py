"""Programs without a model: state, roles, branches, variables, errors, cancellation, batches."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
import time

import pytest

import jserve.lang as sgl
from jserve.lang.backends.scripted import TestBackend

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]


class Held(TestBackend):
    """Answers named "slow" come when `gate` opens; `started` counts those that wait."""

    def __init__(self, answers=None):
        super().__init__({"slow": "late", **(answers or {})})
        self.gate = threading.Event()
        self.started = self.ended = 0

    async def generate(self, prompt, sampling):
        if prompt.name == "slow":
            self.started += 1
            try:
                while not self.gate.is_set():
                    await asyncio.sleep(0.002)
            finally:
                self.ended += 1
        return await super().generate(prompt, sampling)


@pytest.fixture
def make():
    """Backends that are shut down behind the test, which must leave no thread."""
    made = []
    before = set(threading.enumerate())

    def backend(answers=None, kind=TestBackend):
        made.append(kind(answers))
        return made[-1]

    yield backend
    for one in made:
        one.shutdown()
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@sgl.function
def ask(s, question, more="And?"):
    s += sgl.system("Be short.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16))
    s += sgl.user(more)
    s += sgl.assistant(sgl.gen("second"))
    return s["answer"].upper()


def test_a_program_gives_text_messages_variables_and_its_own_value(make):
    state = ask.run("Where?", backend=make({"answer": " here", "second": "there"}))
    assert state["answer"] == " here" and state["second"] == "there"
    assert state.ret_value == " HERE"
    assert state.text() == (
        "SYSTEM:Be short.\nUSER:Where?\nASSISTANT: here\nUSER:And?\nASSISTANT:there\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "here"},  # without the blank in front
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "there"},
    ]
    assert state.error() is None
    assert "answer" in state and "other" not in state
    assert state.get_meta_info("answer")["completion_tokens"] == 5


def test_values_of_run_are_the_base_and_those_of_gen_override_them(make):
    backend = make({"answer": "a", "second": "b"})
    ask.run("?", backend=backend, max_new_tokens=99, temperature=0.0, stop=["\n"])
    first, second = (call.sampling for call in backend.calls)
    assert (first.max_new_tokens, second.max_new_tokens) == (16, 99)
    assert first.temperature == 0.0 and first.stop == ("\n",) and first.top_p == 1.0


def test_arguments_by_place_by_name_bound_and_wrong(make):
    backend = make({"answer": "a", "second": "b"})
    assert "USER:two" in ask.run("one", "two", backend=backend).text()
    bound = ask.bind(more="fixed")
    for run in (
        lambda: bound.run(question="q", more="given", backend=backend),
        lambda: bound.run("q", "given", backend=backend),
        lambda: bound.run_batch([{"question": "q", "more": "given"}], backend=backend)[0],
    ):
        with pytest.warns(
            UserWarning, match="ask: more is bound to 'fixed', what is given"
        ) as told:
            assert "USER:fixed" in run().text()
        assert told[0].filename == __file__
    for wrong, message in (
        (lambda: ask.run("a", "b", "c", backend=backend), "takes 2 arguments, got 3"),
        (lambda: ask.run(qestion="a", backend=backend), "no argument qestion; did you mean quest"),
        (
            lambda: ask.run("a", max_tokens=3),
            "no argument max_tokens; did you mean max_new_tokens?",
        ),
        (lambda: ask.run("a", question="b"), "ask: question is given twice."),
        (lambda: ask.bind(other=1), "has no argument other."),
        (lambda: ask.bind(top_p=1), "no argument top_p; a sampling parameter goes to run or run_b"),
        (lambda: ask.trace(mor="a"), "has no argument mor; did you mean more?"),
        (lambda: ask.run_batch([()], backend=backend), "takes 1 to 2 arguments (question, more)"),
        (lambda: ask.run_batch([], temprature=1, backend=backend), "did you mean temperature?"),
        (lambda: ask.run_batch([{"question": "a", "n": 1}], backend=backend), "goes to run or run"),
        (lambda: ask.run("a"), "no backend: pass backend="),
    ):
        with pytest.raises(sgl.ExpressionError, match=re.escape(message)):
            wrong()
    with pytest.raises(sgl.ExpressionError, match="must be called s"):
        sgl.function(lambda state: None)


def test_the_default_backend_serves_programs_that_name_none(make):
    sgl.set_default_backend(make({"answer": "a", "second": "b"}))
    try:
        assert ask("q")["answer"] == "a"
        assert sgl.get_server_info() == {"model_path": "test"} and sgl.flush_cache()
    finally:
        sgl.set_default_backend(None)
    assert sgl.get_server_info() is None and sgl.flush_cache() is False


def test_role_blocks_and_variable_scopes(make):
    @sgl.function
    def program(s):
        with s.user(), s.var_scope("asked"):
            s += "What is "
            s += "this?"
        with s.assistant():
            s += sgl.gen("a")
        s.system("end")

    state = program.run(backend=make({"a": "That."}))
    assert state["asked"] == "What is this?"
    assert state.text() == "USER:What is this?\nASSISTANT:That.\nSYSTEM:end\n"


def test_expressions_are_put_in_a_row_with_plus_and_with_text(make):
    @sgl.function
    def program(s):
        s += "a " + sgl.gen("x") + " b " + sgl.select("y", ["1", "2"]) + "!"
        s += ["c", sgl.gen("x2"), ("d", "e")]

    state = program.run(backend=make({"x": "X", "y": "2", "x2": "Z"}))
    assert state.text() == "a X b 2!cZde" and state["y"] == "2"


@pytest.mark.parametrize(
    ("dtype", "answer", "regex", "stop"),
    [
        (int, "-12", r"[-+]?[0-9]+[ \n]*", (" ", "\n")),
        ("float", ".5", r"[-+]?[0-9]*\.?[0-9]+[ \n]*", (" ", "\n")),
        (bool, "True", "(True|False)", ()),
        (str, '"a b 1"', r"\"[\w\d\s]*\"", ()),
    ],
)
def test_a_dtype_is_a_regex_and_for_numbers_stops(make, dtype, answer, regex, stop):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", dtype=dtype)

    backend = make({"x": answer})
    assert program.run(backend=backend)["x"] == answer  # texts keep their quotes
    sampling = backend.calls[0].sampling
    assert (sampling.regex, sampling.stop) == (regex, stop)


def test_what_gen_and_select_refuse():
    with pytest.raises(RuntimeError, match="dtype must be int, float, bool or str"):
        sgl.gen("x", dtype=list)
    with pytest.warns(UserWarning, match="dtype int wins over regex"):
        sgl.gen("x", dtype=int, regex="a")
    with pytest.raises(ValueError, match="needs a list of texts"):
        sgl.select("x")
    with pytest.raises(ValueError, match="needs a list of texts"):
        sgl.select("x", choices="ab")
    with pytest.raises(sgl.ExpressionError, match="gen_int takes no regex"):
        sgl.gen_int("x", regex="1")
    with pytest.raises(sgl.ExpressionError, match="not both"):
        sgl.gen("x", regex="1", json_schema={})
    for refused in (sgl.image, sgl.video):
        with pytest.raises(sgl.ExpressionError, match="no model that sees is served"):
            refused("cat.png")


def test_choices_in_gen_are_a_select(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", choices=["yes", "no"], choices_method=sgl.greedy_token_selection)

    state = program.run(backend=make({"x": "no"}))
    assert state["x"] == "no"
    assert state.get_meta_info("x") == {"method": "greedy_token_selection"}


def test_a_schema_may_be_a_dict_and_the_script_must_follow_it(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", json_schema={"type": "object"})

    backend = make({"x": ["{}", "no json"]})
    assert program.run(backend=backend)["x"] == "{}"
    assert backend.calls[0].sampling.json_schema == '{"type": "object"}'
    assert "'no json', does not match its json_schema" in str(program.run(backend=backend).error())


def test_n_answers_are_a_list_and_the_text_goes_on_with_the_first(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", n=2) + "."

    state = program.run(backend=make({"x": ["one", "two"]}))
    assert state["x"] == ["one", "two"] and state.text() == "qone."
    assert len(state.get_meta_info("x")) == 2


def test_reasoning_is_told_from_the_answer_under_a_name_of_its_own(make):
    @sgl.function
    def program(s):
        s += sgl.user("2+2?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3"))

    backend = make({"a": "<think>\neasy\n</think>\n\n4"})
    state = program.run(backend=backend)
    assert state["a"] == "4" and state["a_reasoning_content"] == "easy"


# Branches.


@sgl.function
def tips(s, topic, count):
    s += sgl.user("Tips about " + topic)
    branches = s.fork(count)
    branches += lambda i: sgl.assistant(f"{i + 1}: " + sgl.gen("tip"))
    branches.join()
    s += sgl.assistant("Summary: " + " ".join(s["tip"]) + sgl.gen("end"))


def test_a_fork_computes_the_shared_text_once_and_gathers_variables(make):
    backend = make({"tip": lambda text: f"<{text[-3]}>", "end": "ok"})
    state = tips.run("cats", 3, backend=backend)
    assert state["tip"] == ["<1>", "<2>", "<3>"]
    assert [step.name for step in state.all_steps if step.kind == "gen"] == ["tip"] * 3 + ["end"]
    assert [call.kind for call in backend.calls] == ["commit"] + ["generate"] * 4
    assert backend.calls[0].text == "USER:Tips about cats\n"
    assert "Summary: <1> <2> <3>ok" in state.text()
    assert "1: " not in state.text()  # what branches added stays theirs


def test_text_that_the_backend_has_just_seen_is_not_committed_again(make):
    @sgl.function
    def program(s):
        s += "x" * 100 + sgl.gen("a")
        s.fork(2).join()
        s += "y" * 100
        s.fork(2).join()

    backend = make({"a": "A"})
    program.run(backend=backend)
    assert [call.kind for call in backend.calls] == ["generate", "commit"]


def test_a_fork_of_one_and_a_copy_commit_nothing(make):
    @sgl.function
    def program(s):
        s += "base "
        with s.copy() as branch:
            branch += sgl.gen("x")
        return s.text()

    backend = make({"x": "X"})
    state = program.run(backend=backend)
    assert state["x"] == ["X"] and state.ret_value == "base "
    assert [call.kind for call in backend.calls] == ["generate"]


def test_branches_know_what_was_before_them_and_can_be_appended(make):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        branches = s.fork(2)
        branches += ["1", "2"]
        for branch in branches:
            branch += branch["x"]
        branches.join("concate_and_append")

    assert program.run(backend=make({"x": "X"})).text() == "aX1X2X"


def test_branches_run_at_the_same_time(make):
    @sgl.function
    def program(s):
        branches = s.fork(4)
        branches += "q" + sgl.gen("slow")
        wait_for(lambda: backend.started == 4)
        backend.gate.set()
        branches.join()

    backend = make(kind=Held)
    assert program.run(backend=backend)["slow"] == ["late"] * 4


def test_wrong_branches_are_refused(make):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        for wrong, message in (
            (lambda: branches.__iadd__(["a"]), "2 branches take 2 items, got 1"),
            (lambda: branches.join("merge"), "mode must be one of"),
            (lambda: s.fork(0), "size must be an integer in"),
            (lambda: s.fork(1, position_ids_offset=[1]), "position_ids_offset is not supported"),
        ):
            with pytest.raises(sgl.ExpressionError, match=message):
                wrong()
        branches.join()
        branches += "late"

    with pytest.raises(sgl.ExpressionError, match="this part of the program is over"):
        program.run(backend=make())


# Failures.


@sgl.function
def failing(s):
    s += "before "
    s += sgl.gen("good")
    s += sgl.gen("bad")
    s += sgl.gen("after")


LINE = failing.func.__code__.co_firstlineno + 4


def test_a_failed_call_raises_where_its_value_is_read_and_names_the_line(make):
    backend = make({"good": "G", "bad": ValueError("no luck"), "after": "A"})
    state = failing.run(backend=backend)
    assert state["good"] == "G"
    for name in ("bad", "after"):
        with pytest.raises(sgl.ProgramError) as caught:
            _ = state[name]
        assert f"{__file__}:{LINE}, in failing: gen('bad'): no luck" in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
    assert state.error() is caught.value and caught.value.site.line == LINE
    assert [call.name for call in backend.calls] == ["good", "bad"]  # nothing behind a failure


@pytest.mark.filterwarnings("default::jserve.lang.ProgramWarning")
def test_a_failed_call_is_warned_about_at_its_line(make):
    with pytest.warns(sgl.ProgramWarning, match="no luck") as seen:
        failing.run(backend=make({"good": "G", "bad": ValueError("no luck")}))
    assert (seen[0].filename, seen[0].lineno) == (__file__, LINE)


@pytest.mark.filterwarnings("error::jserve.lang.ProgramWarning")
def test_warnings_that_are_errors_do_not_hide_the_failure(make):
    assert "no luck" in str(
        failing.run(backend=make({"bad": ValueError("no luck"), "good": "G"})).error()
    )


def test_without_a_thread_a_failed_call_raises_where_it_is_added(make):
    with pytest.raises(sgl.ProgramError, match="no luck"):
        failing.run(backend=make({"good": "G", "bad": ValueError("no luck")}), use_thread=False)


def test_a_variable_that_is_not_there_is_a_key_error_at_once(make):
    state = failing.run(backend=make({"good": "G", "bad": "B", "after": "A"}))
    with pytest.raises(KeyError, match="no variable 'other'; it has: after, bad, good"):
        _ = state["other"]


def test_a_branch_that_fails_fails_who_reads_it_and_not_the_join(make):
    @sgl.function
    def program(s):
        branches = s.fork(3)
        branches += lambda i: "q" + sgl.gen("even" if i % 2 == 0 else "odd")
        branches.join()
        s += "q" + sgl.gen("rest")
        return s["even"]

    backend = make({"even": "E", "odd": ValueError("odd one out"), "rest": "R"})
    state = program.run(backend=backend)
    assert state.ret_value == ["E", "E"] and state["rest"] == "R" and state.error() is None
    with pytest.raises(sgl.ProgramError, match="odd one out"):
        _ = state["odd"]


def test_appending_a_branch_that_failed_fails_the_program(make):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += ["q" + sgl.gen("a"), "q" + sgl.gen("b")]
        branches.join("concate_and_append")

    state = program.run(backend=make({"a": "A", "b": ValueError("no luck")}))
    assert "no luck" in str(state.error())


def test_what_the_function_raises_is_raised_by_run_and_kept_by_run_batch(make):
    @sgl.function
    def program(s, number):
        s += "q" + sgl.gen("x")
        if number == 1:
            raise LookupError(f"number {number}")

    backend = make({"x": "X"})
    with pytest.raises(LookupError, match="number 1"):
        program.run(1, backend=backend)
    states = program.run_batch([{"number": i} for i in range(3)], backend=backend)
    assert [state.error() is None for state in states] == [True, False, True]
    assert isinstance(states[1].error(), LookupError)


def test_roles_that_do_not_fit_fail_with_the_line(make):
    @sgl.function
    def program(s):
        s += sgl.user_begin() + sgl.assistant_begin()
        s += sgl.gen("x")

    state = program.run(backend=make({"x": "X"}))
    with pytest.raises(sgl.ProgramError, match="the role assistant: assistant begins inside user"):
        _ = state["x"]


def test_none_cannot_be_added(make):
    @sgl.function
    def program(s):
        s += None

    with pytest.raises(ValueError, match="got None"):
        program.run(backend=make())


def test_a_value_can_be_waited_for_with_a_limit(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("slow")
        with pytest.raises(TimeoutError, match="variable 'slow' did not come within 0.01 s"):
            s.get_var("slow", timeout=0.01)
        with pytest.raises(TimeoutError):
            s.get_meta_info("slow", timeout=0.01)
        backend.gate.set()

    backend = make(kind=Held)
    assert program.run(backend=backend)["slow"] == "late"


def test_nothing_can_be_added_when_the_program_is_over(make):
    state = failing.run(backend=make({"good": "G", "bad": "B", "after": "A"}))
    with pytest.raises(sgl.ExpressionError, match="is over"):
        state += sgl.gen("more")


# Streams.


def test_a_stream_gives_the_text_as_it_comes(make):
    @sgl.function
    def program(s):
        s += "q "
        s += sgl.gen("x")
        s += " end"

    class Slow(TestBackend):
        async def generate_stream(self, prompt, sampling):
            async for piece in super().generate_stream(prompt, sampling):
                yield piece
                await asyncio.sleep(0.02)

    backend = make({"x": "one two three"}, kind=Slow)
    state = program.run(backend=backend, stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == "q one two three end" == state.text()
    assert len(pieces) > 1
    assert "".join(program.run(backend=backend, stream=True).text_iter("x")) == "one two three"
    whole = program.run(backend=backend)
    assert list(whole.text_iter()) == ["q one two three end"]
    assert list(whole.text_iter("x")) == ["one two three"]


def test_values_of_a_streaming_program_can_be_awaited_before_it_names_them(make):
    @sgl.function
    def program(s):
        time.sleep(0.05)
        s += "q" + sgl.gen("x")
        with pytest.raises(KeyError):
            _ = s["never"]  # its own thread does not wait for what nobody has asked for

    state = program.run(backend=make({"x": "X"}), stream=True)
    assert state["x"] == "X"
    with pytest.raises(KeyError):
        _ = state["other"]
    assert state.error() is None


def test_an_async_stream_gives_deltas_and_their_meta_information(make):
    class Scored(TestBackend):
        async def generate_stream(self, prompt, sampling):
            async for piece in super().generate_stream(prompt, sampling):
                meta = {"output_token_logprobs": [[-1.0, len(piece.text), piece.text]]}
                yield type(piece)(piece.text, meta, piece.usage)

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")

    async def read():
        state = program.run(backend=backend, stream=True)
        texts, entries = [], []
        async for delta, meta in state.text_async_iter("x", return_meta_data=True):
            texts.append(delta)
            entries += meta["output_token_logprobs"]
            await asyncio.sleep(0.01)  # the next read finds several chunks
        whole = [
            delta async for delta in program.run(backend=backend, stream=True).text_async_iter()
        ]
        return texts, entries, whole

    backend = make({"x": "one two three four"}, kind=Scored)
    texts, entries, whole = asyncio.run(read())
    assert "q" + "".join(texts) == "qone two three four" == "".join(whole)
    assert [entry[2] for entry in entries] == ["one", " two", " three", " four"]


def test_a_reader_whose_event_loop_is_gone_does_not_end_the_program(make):
    backend = make({"x": "hello"})
    goes_on = threading.Event()

    @sgl.function
    def program(s):
        s += "first"
        s.sync()
        goes_on.wait(10)
        s += sgl.gen("x")

    state = program.run(backend=backend, stream=True)
    loop = asyncio.new_event_loop()
    reader = state.text_async_iter()
    assert loop.run_until_complete(anext(reader)) == "first"
    loop.close()
    goes_on.set()
    assert state["x"] == "hello" and state.text() == "firsthello" and state.error() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_program_whose_event_loop_is_gone_ends(make):
    backend = make(kind=Held)

    @sgl.function
    def program(s):
        s += sgl.gen("slow")

    before = set(threading.enumerate())
    loop = asyncio.new_event_loop()
    task = loop.create_task(program.run_async(backend=backend))
    while not backend.started:
        loop.run_until_complete(asyncio.sleep(0.002))
    loop.close()
    backend.gate.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "jserve-program":
            thread.join(10)
            assert not thread.is_alive()
    assert backend.ended == 1 and not task.done()


def test_a_stream_that_fails_gives_what_came_and_then_raises(make):
    @sgl.function
    def program(s):
        s += "some "
        s += sgl.gen("x")

    state = program.run(backend=make({"x": ValueError("no luck")}), stream=True)
    pieces = []
    with pytest.raises(sgl.ProgramError, match="no luck"):
        for piece in state.text_iter():
            pieces.append(piece)
    assert "".join(pieces) == "some "


# Cancellation, and programs beside an event loop.


def test_cancelling_ends_calls_under_way_and_who_waits_for_them(make):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += sgl.gen("slow")
        branches.join()
        return s["slow"]

    backend = make(kind=Held)
    state = program.run(backend=backend, stream=True)
    wait_for(lambda: backend.started == 2)
    state.cancel()
    with pytest.raises(sgl.ProgramCancelled, match="it was cancelled"):
        _ = state["slow"]
    wait_for(lambda: backend.ended == 2)
    assert isinstance(state.error(), sgl.ProgramCancelled)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_program_can_be_cancelled_by_another_thread_while_run_waits(make, threaded):
    held = []

    @sgl.function
    def program(s):
        held.append(s)
        s += sgl.gen("slow")
        _ = s["slow"]

    def cancel():
        wait_for(lambda: backend.started == 1)
        held[0].cancel()

    backend = make(kind=Held)
    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(sgl.ProgramCancelled):
        program.run(backend=backend, use_thread=threaded)
    thread.join()
    wait_for(lambda: backend.ended == 1)


def test_a_program_runs_beside_an_event_loop_and_is_cancelled_with_its_task(make):
    @sgl.function
    def program(s, name):
        s += "q" + sgl.gen(name)
        return s[name]

    async def main():
        state = await program.run_async("x", backend=backend)
        waiting = asyncio.create_task(program.run_async("slow", backend=backend))
        while not backend.started:
            await asyncio.sleep(0.002)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(sgl.ProgramError, match="no answer for 'none'"):
            await program.run_async("none", backend=backend)
        return state.ret_value

    backend = make({"x": "X"}, kind=Held)
    assert asyncio.run(main()) == "X"
    wait_for(lambda: backend.ended == 1)


def test_context_variables_of_the_program_reach_the_backend(make):
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Looking(TestBackend):
        async def generate(self, prompt, sampling):
            seen.append(variable.get())
            return await super().generate(prompt, sampling)

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    variable.set("mine")
    program.run(backend=make({"x": "X"}, kind=Looking))
    assert seen == ["mine"]


def test_an_interrupt_cancels_what_is_under_way(make):
    @sgl.function
    def program(s):
        s += sgl.gen("slow")
        wait_for(lambda: backend.started == 1)
        raise KeyboardInterrupt

    backend = make(kind=Held)
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    wait_for(lambda: backend.ended == 1)


def test_what_will_never_come_is_not_waited_for(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("a")
        assert s["a"] == "A"
        with pytest.raises(KeyError, match="has no variable 'b'; it has: a"):
            _ = s["b"]
        s += "done"

    state = program.run(backend=make({"a": "A"}), stream=True)
    assert state.text() == "qAdone" and state.error() is None


@pytest.mark.parametrize("threaded", [True, False])
def test_a_backend_that_is_shut_down_ends_its_programs(make, threaded):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")
        _ = s["x"]
        backend.shutdown()
        s += "more" + sgl.gen("slow")
        _ = s["slow"]

    backend = make({"x": "X"}, kind=Held)
    with pytest.raises(sgl.BackendError.__mro__[1], match="shut down"):
        program.run(backend=backend, use_thread=threaded)


def test_a_backend_may_be_shut_down_under_a_call(make):
    @sgl.function
    def program(s):
        s += sgl.gen("slow")
        _ = s["slow"]

    backend = make(kind=Held)
    state = program.run(backend=backend, stream=True)
    wait_for(lambda: backend.started == 1)
    backend.shutdown()
    assert "its backend was shut down" in str(state.error())


def test_a_function_that_raises_ends_its_calls_under_way(make):
    @sgl.function
    def program(s):
        s += sgl.gen("slow")
        wait_for(lambda: backend.started == 1)
        raise LookupError("enough")

    backend = make(kind=Held)
    with pytest.raises(LookupError):
        program.run(backend=backend)
    wait_for(lambda: backend.ended == 1)


def test_names_of_sglang_that_are_not_here_say_what_to_use():
    with pytest.raises(AttributeError, match="use OpenAI"):
        _ = sgl.LiteLLM
    with pytest.raises(AttributeError, match="the flags of Engine and Runtime"):
        _ = sgl.ServerArgs
    assert [name for name in sgl.__all__ if not hasattr(sgl, name)] == []


# Batches.


def test_a_batch_keeps_its_order_and_computes_the_shared_prefix_once_before(make):
    @sgl.function
    def program(s, number):
        s += "An introduction that all of them share, longer than sixty-four characters. "
        s += str(number) + sgl.gen("x")

    backend = make({"x": lambda text: text[-1]})
    states = program.run_batch([{"number": i} for i in range(8)], backend=backend)
    assert [state["x"] for state in states] == list("01234567")
    assert backend.calls[0].kind == "commit"
    assert backend.calls[0].text.endswith("characters. ")
    assert [call.kind for call in backend.calls].count("commit") == 1


def test_a_short_prefix_or_one_program_is_not_computed_before(make):
    @sgl.function
    def program(s, number):
        s += "Short. " + sgl.gen("x")

    backend = make({"x": "X"})
    program.run_batch([(1,), (2,)], backend=backend)
    ask.run_batch([{"question": "q"}], backend=make({"answer": "a", "second": "b"}))
    assert {call.kind for call in backend.calls} == {"generate"}


def test_precaching_can_be_switched_off(make):
    @sgl.function
    def program(s, number):
        s += "x" * 100 + sgl.gen("x")

    backend = make({"x": "X"})
    sgl.global_config.enable_precache_with_tracing = False
    try:
        program.run_batch([(1,), (2,)], backend=backend)
    finally:
        sgl.global_config.enable_precache_with_tracing = True
    assert {call.kind for call in backend.calls} == {"generate"}


@pytest.mark.parametrize("num_threads", ["auto", 1, 3])
def test_batches_of_any_number_of_threads(make, num_threads):
    backend = make({"answer": "a", "second": "b"})
    items = [{"question": str(i)} for i in range(7)]
    states = ask.run_batch(items, backend=backend, num_threads=num_threads, temperature=0)
    assert [state.messages()[1]["content"] for state in states] == list("0123456")
    assert all(call.sampling.temperature == 0 for call in backend.calls if call.sampling)
    assert ask.run_batch([], backend=backend) == []


def test_threads_must_be_a_number(make):
    with pytest.raises(sgl.ExpressionError, match="num_threads must be auto or >= 1"):
        ask.run_batch([("a", "b")], backend=make(), num_threads=0)


def test_a_progress_bar_counts_programs(make, capsys):
    backend = make({"answer": "a", "second": "b"})
    ask.run_batch([("a", "b")] * 3, backend=backend, progress_bar=True)
    assert "3/3" in capsys.readouterr().err


def test_a_generator_of_states_begins_before_all_are_done_and_can_be_left(make):
    @sgl.function
    def program(s, name):
        s += "q" + sgl.gen(name)
        _ = s[name]

    backend = make({"x": "X"}, kind=Held)
    items = [("x",)] + [("slow",)] * 5
    states = program.run_batch(items, backend=backend, generator_style=True)
    assert next(states)["x"] == "X"
    wait_for(lambda: backend.started == 5)
    states.close()
    wait_for(lambda: backend.ended == 5)


def test_a_generator_has_at_most_200_under_way(make):
    @sgl.function
    def program(s, number):
        counted.append(number)
        s += "q" + sgl.gen("x")

    counted = []
    states = program.run_batch(
        [(i,) for i in range(450)],
        backend=make({"x": "X"}),
        generator_style=True,
        num_threads=450,
    )
    next(states)
    time.sleep(0.05)
    assert len(counted) <= 201
    assert len([*states]) == 449 and len(counted) == 451  # and the trace for the prefix


# Looking ahead.


def test_one_long_answer_serves_later_gens_as_long_as_it_is_what_the_program_writes(make):
    @sgl.function(num_api_spec_tokens=64)
    def card(s, title):
        s += "Card of Ada\nName:" + sgl.gen("name", stop="\n", max_tokens=4) + "\n" + title
        s += sgl.gen("job", stop="\n") + "\nBorn:" + sgl.gen("born", dtype=int)

    backend = make({"name": " Ada\nJob: poet\nBorn: 1815\n", "job": " countess\n", "born": "1815"})
    state = card.run("Job:", backend=backend)
    assert (state["name"], state["job"], state["born"]) == (" Ada", " poet", "1815")
    assert [call.name for call in backend.calls] == ["name", "born"]  # a pattern needs a call
    assert backend.calls[0].sampling.max_new_tokens == 64 and backend.calls[0].sampling.stop == ()
    assert state.get_meta_info("job")["speculated"] is True
    other = card.run("Title:", backend=backend)
    assert other["job"] == " countess"  # the model wrote something else in between
    assert [call.name for call in backend.calls][2:] == ["name", "job", "born"]


# Traces.


def test_a_trace_shows_the_program_with_arguments_unknown():
    trace = ask.trace()
    kinds = [(step.kind, step.name) for step in trace.steps if step.kind != "text"]
    assert ("argument", "question") in kinds and ("gen", "answer") in kinds
    assert trace.prefix == "SYSTEM:Be short.\nUSER:"
    end = trace.steps[-1]
    assert end.kind == "end" and "the variable answer has no value" in end.text
    assert end.site.function == "ask"


def test_a_trace_of_branches_and_of_other_programs():
    @sgl.function
    def inner(s):
        s += "inner " + sgl.gen("i")

    @sgl.function
    def outer(s, topic):
        s += "about " + topic
        branches = s.fork(2)
        branches += lambda i: f"{i}" + sgl.gen("x")
        branches.join()
        s += s["x"]
        inner()

    trace = outer.trace()
    fork = next(step for step in trace.steps if step.kind == "fork")
    assert [[step.kind for step in branch] for branch in fork.branches] == [["text", "gen"]] * 2
    call = next(step for step in trace.steps if step.kind == "call")
    assert call.name == "inner" and call.branches[0][1].name == "i"
    known = outer.trace(topic="cats")
    assert known.prefix == "about cats"


def test_a_traced_value_cannot_be_looked_into():
    value = failing.trace()["good"]
    for look in (bool, str, len, list, int, lambda v: v == "x", lambda v: f"{v}", lambda v: v[0]):
        with pytest.raises(TypeError, match="the variable good has no value"):
            look(value)


def test_steps_say_what_each_call_reused_and_computed(make):
    state = ask.run("Where?", backend=make({"answer": "here", "second": "there"}))
    first, second = (step for step in state.steps if step.kind == "gen")
    assert first.usage.cached_tokens == 0 and first.usage.prompt_tokens == 39
    assert second.usage.cached_tokens == 43  # the first prompt and its answer
    assert state.usage == first.usage + second.usage
    assert first.site.line == ask.func.__code__.co_firstlineno + 4


def test_a_branch_takes_text_by_its_number_and_is_not_replaced() -> None:
    @sgl.function
    def tips(s):
        branches = s.fork(2)
        for i in range(2):
            branches[i] += f"Tip {i + 1}:"
            branches[i] += sgl.gen("tip")
        branches.join()
        with pytest.raises(sgl.ExpressionError, match="another's place"):
            branches[0] = branches[1]

    state = tips.run(backend=TestBackend({"tip": ["one", "two"]}))
    assert sorted(state["tip"]) == ["one", "two"]


def test_tuples_of_a_batch_may_leave_out_what_has_a_default() -> None:
    @sgl.function
    def pair(s, a, b="x"):
        s += a + b

    states = pair.run_batch([("u",), ("u", "v")], backend=TestBackend({}))
    assert [state.text() for state in states] == ["ux", "uv"]
    for item, message in (((), "takes 1 to 2"), (("a", "b", "c"), "takes 1 to 2"), (3, "a tuple")):
        with pytest.raises(sgl.ExpressionError, match=message):
            pair.run_batch([item], backend=TestBackend({}))


def test_functions_that_cannot_be_programs_are_refused_where_they_are_made() -> None:
    async def waits(s):
        s += "a"

    def yields(s):
        yield s

    def stars(s, *words):
        s += words

    def by_place(s, word, /):
        s += word

    for func in (waits, yields, stars, by_place):
        with pytest.raises(sgl.ExpressionError, match=func.__name__):
            sgl.function(func)

    @sgl.function
    def others(s, word, **more):
        s += word + repr(more)

    assert others.run("q", z=1, backend=TestBackend({})).text() == "q{'z': 1}"


@pytest.mark.parametrize("method", ["greedy_token_selection", None, 0.0])
def test_a_choices_method_by_another_name_is_refused_at_the_call(method) -> None:
    with pytest.raises(sgl.ExpressionError, match="choices_method must be one of"):
        sgl.select("k", ["x"], choices_method=method)


def test_a_url_is_no_backend_and_the_message_says_what_is() -> None:
    with pytest.raises(sgl.ExpressionError, match=r"RuntimeEndpoint\(url\)"):
        sgl.set_default_backend("http://127.0.0.1:30000")
