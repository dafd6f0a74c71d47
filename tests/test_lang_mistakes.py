"""What a program gets easily wrong: each is told where it stands, none reaches a prompt unseen."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import jserve.lang as sgl
from jserve.lang.sampling import Sampling, SamplingArguments

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


# Messages that the state itself adds.


def test_a_message_of_the_state_is_added_by_its_call(make):
    @sgl.function
    def program(s):
        s.system("Be short.")
        s.user("Where?")
        s.assistant(sgl.gen("a"))
        s += sgl.user("And?")

    state = program.run(backend=make({"a": "Here."}))
    assert state.text() == "SYSTEM:Be short.\nUSER:Where?\nASSISTANT:Here.\nUSER:And?\n"
    assert [one["role"] for one in state.messages()] == ["system", "user", "assistant", "user"]
    assert program.trace().prefix == "SYSTEM:Be short.\nUSER:Where?\nASSISTANT:"


@pytest.mark.parametrize(
    "add",
    [
        lambda s: s.__iadd__(s.user("x")),
        lambda s: s.__iadd__("before " + s.user("x")),
        lambda s: s.__iadd__(s.user("x") + "behind"),
        lambda s: s.__iadd__(sgl.gen("a") + s.user("x")),
        lambda s: s.__iadd__(["before", s.user("x")]),
        lambda s: s.__iadd__(f"before {s.user('x')}"),
        lambda s: s.fork(2).__iadd__(s.user("x")),
    ],
)
def test_what_is_added_already_is_not_added_again(make, add):
    held = []

    @sgl.function
    def program(s):
        held.append(s)
        with pytest.raises(sgl.ExpressionError, match=r"s\.user\(…\) has added .* sgl\.user\(…\)"):
            add(s)

    assert program.run(backend=make({"a": "A"})).text() == "USER:x\n"
    program.trace()
    assert len(held) == 2


# Expressions are no text.


@pytest.mark.parametrize("form", [str, lambda e: f"{e}", lambda e: f"{e:>9}", "<{}>".format])
@pytest.mark.parametrize(
    ("expr", "what"),
    [
        (sgl.gen("x"), r"gen\('x'\)"),
        (sgl.select("y", ["a"]), r"select\('y'\)"),
        (sgl.user("z"), "an expression"),
        ("a" + sgl.gen("x"), "an expression"),
        (sgl.user_begin(), "the role user"),
    ],
)
def test_an_expression_in_an_f_string_says_to_use_plus(form, expr, what):
    with pytest.raises(sgl.ExpressionError, match=rf"^{what} has no text before .* with \+"):
        form(expr)
    assert repr(expr)  # for debuggers


def test_a_program_with_a_gen_in_an_f_string_ends_there(make):
    @sgl.function
    def program(s):
        s += f"Name: {sgl.gen('name')}"

    backend = make({"name": "Ada"})
    with pytest.raises(sgl.ExpressionError, match=r"gen\('name'\) has no text"):
        program.run(backend=backend)
    assert backend.calls == []
    end = program.trace().steps[-1]
    assert end.kind == "end" and "gen('name') has no text" in end.text


# Streams of what is no text.


def test_a_stream_of_a_variable_that_is_no_text_is_refused(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("two", n=2)
        branches = s.fork(2)
        branches += sgl.gen("joined")
        branches.join()
        s["number"] = 7

    async def read(state, name):
        return [delta async for delta in state.text_async_iter(name)]

    backend = make({"two": ["a", "b"] * 2, "joined": "c"})
    for state in (program.run(backend=backend), program.run(backend=backend, stream=True)):
        for name, kind in (("two", "list"), ("joined", "list"), ("number", "int")):
            message = rf"text_iter: {name} is a {kind}, no text; read s\['{name}'\]"
            with pytest.raises(sgl.ExpressionError, match=message):
                list(state.text_iter(name))
            with pytest.raises(sgl.ExpressionError, match=message):
                asyncio.run(read(state, name))
        assert state["two"] == ["a", "b"] and state["joined"] == ["c", "c"]


# The script refuses what an engine does.


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (lambda: sgl.gen("x", top_p=2), "top_p must be in (0, 1], got 2"),
        (lambda: sgl.gen("x", temperature=-1), "temperature must be in [0, "),
        (lambda: sgl.gen("x", max_tokens=-1), "max_new_tokens must be >= 0"),
        (lambda: sgl.gen("x", max_tokens=2, min_tokens=3), "min_new_tokens must be <= max_new"),
        (lambda: sgl.gen("x", max_tokens="2"), "max_new_tokens must be an integer, got '2'"),  # type: ignore[arg-type]
        (lambda: sgl.gen("x", n=0), "n must be in [1, 128], got 0"),
        (lambda: sgl.gen("x", stop=[""]), "stop must be non-empty strings"),
        (lambda: sgl.gen("x", stop_regex="("), "stop_regex"),
        (lambda: sgl.gen("x", return_logprob=True, top_logprobs_num=99), "top_logprobs_num must"),
        (lambda: sgl.gen("x", regex="a(?=b)"), "Failed to compile regex grammar: "),
        (lambda: sgl.gen("x", json_schema="{"), "Failed to compile json_schema grammar: "),
        (lambda: sgl.gen("x", json_schema={"not": {}}), "Failed to compile json_schema grammar: "),
        (lambda: sgl.select("x", ["a"], temperature=0.5), "select needs temperature 0, got 0.5"),
    ],
)
def test_a_script_refuses_a_call_that_an_engine_refuses(make, expr, message):
    @sgl.function
    def program(s):
        s += "q" + expr()

    error = program.run(backend=make({"x": "a"})).error()
    assert isinstance(error, sgl.ProgramError) and message in str(error), error


@pytest.mark.parametrize(
    ("expr", "good", "bad"),
    [
        (lambda: sgl.gen("x", regex="[a-c]+"), "abc", "abd"),
        (lambda: sgl.gen("x", regex="é|日本"), "日本", "日"),
        (lambda: sgl.gen_int("x"), "-12", "1.5"),
        (lambda: sgl.gen("x", json_schema={"type": "integer", "maximum": 9}), "9", "10"),
        (
            lambda: sgl.gen(
                "x", json_schema={"properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            ),
            '{"a": true}',
            '{"b": 1}',
        ),
    ],
)
def test_a_script_answers_only_what_the_grammar_of_an_engine_allows(make, expr, good, bad):
    @sgl.function
    def program(s):
        s += "q" + expr()

    assert program.run(backend=make({"x": good}))["x"] == good
    assert f"{bad!r}, does not match its" in str(program.run(backend=make({"x": bad})).error())


def test_what_openais_api_cannot_say_is_refused_before_it_is_asked():
    backend = sgl.OpenAI("m", is_chat_model=False, base_url="http://127.0.0.1:9", encode=list)

    @sgl.function
    def program(s, expr):
        s += "q" + expr

    for expr, message in (
        (sgl.gen("x", return_logprob=True), "return_logprob is for engines and their servers"),
        (sgl.select("x", ["a"], temperature=0.5), "select needs temperature 0, got 0.5"),
    ):
        assert message in str(program.run(expr, backend=backend).error())
    backend.shutdown()


# What a type checker sees.


def test_arguments_that_a_type_checker_sees_are_those_of_sampling():
    seen = typing.get_type_hints(SamplingArguments)
    assert seen == typing.get_type_hints(Sampling)


_TYPED = """
import jserve.lang as sgl


@sgl.function
def program(s: sgl.ProgramState, word: str) -> None:
    s.user("About " + word)
    with s.assistant():
        s += sgl.gen("a")
    s += s.user(word)  # wrong: added already
    s += None  # wrong: nothing


states = program.run_batch([{"word": "x"}, {"word": "y"}], temperature=0, stop="!")
print(states[0]["a"], len(states))
for state in program.run_batch([("x",)], generator_style=True):
    for piece in state.text_iter("a"):
        print(piece.upper())
print(program.run_batch([("x",)], generator_style=True)[0])  # wrong: a generator
program.run_batch([{"word": "x"}], temprature=0)  # wrong: the name
program.run_batch([{"word": "x"}], top_k=0.5)  # wrong: the type
program.run_batch([{"word": "x"}], num_threads="all")  # wrong: the word
program.run_batch([1, 2])  # wrong: no arguments
"""


@pytest.mark.full
def test_a_type_checker_tells_wrong_lines_from_right_ones(tmp_path):
    root = Path(__file__).resolve().parent.parent
    (tmp_path / "typed.py").write_text(_TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "typed.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = {int(line) for line in re.findall(r"typed\.py:(\d+):\d+ - error", done.stdout)}
    wrong = {at for at, line in enumerate(_TYPED.split("\n"), 1) if "# wrong" in line}
    assert told == wrong, done.stdout
