"""Programs on an engine in this process: real scheduler and cache, the next token a formula."""

from __future__ import annotations

import threading
import time

import pytest
from fake_engine import PAGE, continuation

import jserve.lang as sgl
from jserve.engine.engine import Engine
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def engine():
    tokenizer = Tokenizer(byte_source(256, templates={"default": TEMPLATE}))
    with Engine("fake", inline=True, builder="tests.fake_engine:build", tokenizer=tokenizer) as one:
        yield one


def said(prompt: str, count: int) -> str:
    return bytes(continuation(list(prompt.encode()), count)).decode()


def idle(engine) -> dict[str, float]:
    """Server info when nothing runs."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        info = engine.get_server_info()
        if not info["num_running_reqs"] and not info["num_queue_reqs"]:
            return info
        time.sleep(0.01)
    raise AssertionError(f"still busy: {info}")


@sgl.function
def chat(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a", max_tokens=6))
    s += sgl.user("More?")
    s += sgl.assistant(sgl.gen("b", max_tokens=6))


def test_a_program_runs_on_the_engine_itself_and_reuses_its_own_prefix(engine):
    engine.flush_cache()
    state = chat.run("What is it?", backend=engine, temperature=0)
    first = "<user>What is it?</><assistant>"
    assert state["a"] == said(first, 6)
    second = first + state["a"] + "</><user>More?</><assistant>"
    assert state["b"] == said(second, 6)
    meta = state.get_meta_info("b")
    assert meta["prompt_tokens"] == len(second)
    assert meta["cached_tokens"] == (len(first) + 5) // PAGE * PAGE


def test_the_prompt_of_a_program_is_that_of_the_same_messages(engine):
    state = chat.run("What is it?", backend=engine, temperature=0)
    messages = [{"role": "user", "content": "What is it?"}]
    messages += [{"role": "assistant", "content": state["a"]}, {"role": "user", "content": "More?"}]
    assert state.messages()[:3] == messages
    ids = engine.tokenizer.apply_chat_template(messages)
    assert state.text().encode().startswith(bytes(ids))


def test_a_fork_computes_its_shared_text_once(engine):
    shared = "A text of some length that all of the branches begin with. "

    @sgl.function
    def program(s):
        s += shared
        branches = s.fork(4)
        branches += lambda i: f"{i}:" + sgl.gen("x", max_tokens=4)
        branches.join()

    engine.flush_cache()
    before = idle(engine)["prefill_tokens_total"]
    state = program.run(backend=engine, temperature=0)
    assert state["x"] == [said(f"{shared}{i}:", 4) for i in range(4)]
    whole = len(shared) // PAGE * PAGE
    tail = len(shared) - whole + 2
    computed = idle(engine)["prefill_tokens_total"] - before
    assert computed == whole + 4 * tail == state.usage.computed_tokens
    assert state.usage.cached_tokens == 4 * whole


def test_a_batch_computes_its_shared_prefix_once(engine):
    intro = "An introduction of more than sixty-four characters, which every program shares. "

    @sgl.function
    def program(s, number):
        s += intro
        s += f"{number}:"  # traced, this ends the prefix
        s += sgl.gen("x", max_tokens=3)

    engine.flush_cache()
    before = idle(engine)["prefill_tokens_total"]
    states = program.run_batch([{"number": i} for i in range(8)], backend=engine, temperature=0)
    assert [state["x"] for state in states] == [said(f"{intro}{i}:", 3) for i in range(8)]
    whole = len(intro) // PAGE * PAGE
    computed = idle(engine)["prefill_tokens_total"] - before
    assert computed == whole + 8 * (len(intro) - whole + 2)


def test_select_scores_on_the_engine(engine):
    @sgl.function
    def program(s):
        s += "Now pick: " + sgl.select("x", ["b", "a", "cc"])
        s += sgl.select("y", ["b", "a"], choices_method=sgl.unconditional_likelihood_normalized)

    state = program.run(backend=engine)
    assert state["x"] == "a"  # the log-probability of token t is −t / 1000
    tokens = state.get_meta_info("x")["input_token_logprobs"]
    assert [entry[2] for entry in tokens[0]] == [":", " ", "b"]
    assert tokens[0][2][0] == pytest.approx(-98 / 1000)
    assert state["y"] in ("a", "b")
    first, second = (step.usage for step in state.steps if step.usage is not None)
    assert first.num_calls == 1 + 3 and second.num_calls == 2 + 2  # prompt, choices; also alone
    shared = (10 - 3) // PAGE * PAGE
    assert first.cached_tokens == 3 * shared  # whatever was computed before was used
    assert first.computed_tokens == shared + 2 * (11 - shared) + (12 - shared)


def test_streams_and_several_answers(engine):
    @sgl.function
    def program(s):
        s += "go:" + sgl.gen("x", max_tokens=9)
        s += sgl.gen("y", max_tokens=3, n=2)

    state = program.run(backend=engine, temperature=0, stream=True)
    assert "".join(state.text_iter("x")) == said("go:", 9)
    assert state["y"] == [said("go:" + state["x"], 3)] * 2


def test_a_run_on_an_engine_leaves_no_thread_when_its_state_is_dropped(engine):
    before = set(threading.enumerate())
    for _ in range(5):
        state = chat.run("What?", backend=engine, temperature=0)
        assert state.error() is None
    del state
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.005)


def test_what_the_engine_refuses_names_the_line(engine):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", top_p=2)

    with pytest.raises(sgl.ProgramError, match=r"in program: gen\('x'\): top_p must be in"):
        _ = program.run(backend=engine)["x"]


def test_cancelled_programs_leave_no_request_behind(engine):
    @sgl.function
    def program(s):
        s += "go"
        branches = s.fork(3)
        branches += sgl.gen("x", max_tokens=400, ignore_eos=True)
        branches.join()

    state = program.run(backend=engine, stream=True)
    deadline = time.monotonic() + 5
    while engine.get_server_info()["num_running_reqs"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    state.cancel()
    with pytest.raises(sgl.ProgramCancelled):
        _ = state["x"]
    check_nothing_is_held(engine)


def check_nothing_is_held(engine):
    info = idle(engine)
    assert info["kv_available_tokens"] + info["kv_evictable_tokens"] == info["max_total_num_tokens"]


def test_200_programs_with_branches_errors_and_cancellations_leave_nothing_behind(engine):
    fates = ["fine", "refused", "raises", "cancelled", "branch refused"]
    cancelled = []

    @sgl.function
    def program(s, number, fate):
        s += f"Program {number % 7} begins with a text that others share. "
        branches = s.fork(1 + number % 3)
        branches += lambda i: f"{i}" + sgl.gen("x", max_tokens=8)
        if fate == "branch refused":
            branches[0].__iadd__(sgl.gen("y", top_p=2))
        if fate == "cancelled":
            cancelled.append(s)
            threading.Timer(0.001 * (number % 20), s.cancel).start()
            branches += sgl.gen("long", max_tokens=300, ignore_eos=True)
        branches.join()
        s += "".join(s["x"]) + sgl.gen("z", max_tokens=4, top_p=2 if fate == "refused" else None)
        if fate == "raises":
            raise LookupError(number)
        return s["z"]

    items = [{"number": i, "fate": fates[i % len(fates)]} for i in range(200)]
    before = set(threading.enumerate())
    backend = sgl.EngineBackend(engine)
    states = program.run_batch(items, backend=backend, temperature=0)
    backend.shutdown()
    for item, state in zip(items, states, strict=True):
        error, fate = state.error(), item["fate"]
        if fate in ("fine", "branch refused"):
            assert error is None and len(state.ret_value) == 4, (item, error)
        elif fate == "refused":
            assert "top_p must be in" in str(error)
        elif fate == "raises":
            assert isinstance(error, LookupError)
        else:
            assert isinstance(error, sgl.ProgramCancelled), (item, error)
    assert len(cancelled) == 40
    check_nothing_is_held(engine)
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)
