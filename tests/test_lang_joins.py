"""Branches that are appended: their messages and text come home as if the source had said them; and
text that grows by many pieces.
"""

from __future__ import annotations

import asyncio
import time

import pytest

import jserve.lang as sgl
from jserve.lang.board import Board
from jserve.lang.growing import GrowingText
from jserve.lang.named_templates import named_template
from jserve.lang.roles import shared_length
from jserve.lang.transcript import Transcript

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]


@pytest.fixture
def make():
    made = []

    def backend(answers=None, **more):
        made.append(sgl.TestBackend(answers, **more))
        return made[-1]

    yield backend
    for one in made:
        one.shutdown()


def rendered(messages, name):
    """The text of a conversation that is said piece by piece."""
    board = Board()
    transcript, template = Transcript(board), named_template(name)

    async def say():
        for message in messages:
            await transcript.begin(message["role"], template)
            transcript.write(message["content"])
            await transcript.end(message["role"], template)

    asyncio.run(say())
    return board.text


@pytest.mark.parametrize("template", ["default", "chatml", "qwen", "vicuna_v1.1"])
def test_messages_of_appended_branches_come_home_in_order(make, template):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: sgl.user(f"Question {i}?") + sgl.assistant(sgl.gen("a"))
        branches.join("concate_and_append")
        s += sgl.user("Which was better?") + sgl.assistant(sgl.select("best", ["0", "1"]))

    backend = make({"a": lambda text: f"yes{text.count('?')}"}, chat_template_name=template)
    state = program.run(backend=backend)
    said = [(one["role"], one["content"]) for one in state.messages() if one["role"] != "system"]
    assert said == [
        ("user", "Question 0?"),
        ("assistant", "yes1"),
        ("user", "Question 1?"),
        ("assistant", "yes1"),
        ("user", "Which was better?"),
        ("assistant", "0"),
    ]
    assert state.text() == rendered(state.messages(), template)  # a system prompt stands once


def test_branches_inside_a_message_are_appended_to_it(make):
    @sgl.function
    def program(s):
        s += sgl.user("Two words.") + sgl.assistant_begin() + "Words:"
        branches = s.fork(2)
        branches += lambda i: f" {i}" + sgl.gen("word")
        branches[1].__iadd__(sgl.assistant_end() + sgl.user("More.") + sgl.assistant_begin())
        branches.join("concate_and_append")
        s += sgl.gen("last") + sgl.assistant_end()

    state = program.run(backend=make({"word": "x", "last": "end"}))
    assert [one["content"] for one in state.messages()] == [
        "Two words.",
        "Words: 0x 1x",
        "More.",
        "end",
    ]
    assert state.error() is None


def test_branches_whose_roles_do_not_follow_each_other_fail_with_the_line_of_the_join(make):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += sgl.user_begin() + "open"
        branches.join("concate_and_append")

    error = program.run(backend=make()).error()
    line = program.func.__code__.co_firstlineno + 4
    assert f":{line}, in program: the role user: user begins inside user" in str(error)


def test_appended_branches_of_branches_and_variables_of_a_scope(make):
    @sgl.function
    def program(s):
        s += "a"
        outer = s.fork(2)
        for number, branch in enumerate(outer):
            inner = branch.fork(2)
            inner += lambda i, number=number: f"<{number}{i}>"
            inner.join("concate_and_append")
        with s.var_scope("all"):
            outer.join("concate_and_append")

    state = program.run(backend=make())
    assert state.text() == "a<00><01><10><11>"
    assert state["all"] == "<00><01><10><11>"


def test_a_failed_branch_is_no_error_of_the_program_until_it_is_read(make):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: "q" + sgl.gen(f"x{i}")
        branches.join()
        s += "rest"

    state = program.run(backend=make({"x0": "X", "x1": ValueError("no luck")}))
    assert state.error() is None and state.text() == "rest" and state["x0"] == ["X"]
    with pytest.raises(sgl.ProgramError, match="no luck"):
        _ = state["x1"]


# Text that grows.


def test_growing_text_is_what_was_added():
    text, plain = GrowingText("ab"), "ab"
    for number in range(50):
        for position in (0, 1, len(plain) // 2, len(plain) - 1, len(plain)):
            assert text.since(position) == plain[position:]
        assert len(text) == len(plain)
        if number % 7 == 0:
            assert text.whole == plain
        piece = "xyz"[: number % 4]
        text.add(piece)
        plain += piece
    assert text.whole == plain


def test_many_additions_cost_what_they_add(make):
    @sgl.function
    def program(s, count):
        with s.user():
            for _ in range(count):
                s += "x" * 1000

    def seconds(count: int) -> float:
        started = time.perf_counter()
        state = program.run(count, backend=backend, stream=True)
        assert sum(map(len, state.text_iter())) == 1000 * count + len("USER:\n")
        program.trace(count=count)
        return time.perf_counter() - started

    backend = make(chat_template_name="default")
    seconds(100)
    few = min(seconds(2_000) for _ in range(3))
    assert seconds(12_000) < 6 * 4 * few, "the text is copied with each addition"


def test_a_shared_beginning_is_found_at_any_place():
    for size in range(6):
        one, other = "a" * size, "a" * 4
        assert shared_length(one, other) == min(size, 4)
        assert shared_length(one + "b", other + "c") == min(size, 4)
    assert shared_length("x" * 100_000 + "y", "x" * 100_000 + "z") == 100_000
