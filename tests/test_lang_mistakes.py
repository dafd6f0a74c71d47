"""What a program gets easily wrong: each is told where it stands, none reaches a prompt unseen."""

from __future__ import annotations

import asyncio
import os
import pprint
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import jserve.lang as sgl
from jserve.lang.ir import Expr, Select
from jserve.lang.sampling import Sampling, SamplingArguments

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]
untyped: Any = sgl  # for what a type checker would refuse


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


def test_a_message_with_a_text_is_no_block(make):
    @sgl.function
    def program(s):
        s += "q"
        with untyped_user(s, "x"):
            s += "y"

    with pytest.raises(sgl.ExpressionError, match=r"has added .* a block is with s\.user\(\):"):
        program.run(backend=make())


def untyped_user(s, text) -> Any:
    return s.user(text)


@pytest.mark.parametrize(
    "add",
    [
        lambda s: s.user(),
        lambda s: s.user(None),
        lambda s: s.var_scope("v"),
        lambda s: (s.assistant(), s.__iadd__("more")),
        lambda s: (s.system(), s.user("x")),
        lambda s: (s.user(), s.user().__enter__()),
    ],
)
def test_a_block_without_with_is_told_with_its_line(make, add):
    @sgl.function
    def program(s):
        s += "q"
        add(s)

    told = r"test_lang_mistakes.py:\d+, .*`with s\.user\(\):`"
    with pytest.raises(sgl.ExpressionError, match=told):
        program.run(backend=make())


def test_blocks_that_are_entered_are_fine_in_every_order(make):
    @sgl.function
    def program(s):
        with s.user(), s.var_scope("v"):
            s += "x"
        branches = s.fork(2)
        with branches[0].assistant():
            branches[0].__iadd__("a")
        branches.join()

    assert program.run(backend=make())["v"] == "x"


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


_ITEM = sgl.gen("x")


@pytest.mark.parametrize(
    "form",
    [
        repr,
        lambda e: f"a {e!r} b",
        lambda e: f"{e!a:>90}",
        lambda e: f"{e=}",
        lambda e: f"{[e]}",
        lambda e: f"{ {'k': (e,)} }",
        lambda e: "a %r b" % (e,),  # noqa: UP031
        lambda e: "{!r}".format(e),  # noqa: UP032
        lambda e: ", ".join(map(repr, [e, e])),
        lambda e: str((e, "x")),
        pprint.pformat,
    ],
)
@pytest.mark.parametrize(
    ("thing", "what"),
    [
        (lambda s: sgl.gen("x"), r"gen\('x'\)"),
        (lambda s: sgl.select("y", ["a"]), r"select\('y'\)"),
        (lambda s: sgl.user("z"), "an expression"),
        (lambda s: sgl.assistant_end(), "the role assistant"),
        (lambda s: s.user("z"), r"s\.user\(.+\)"),
        (lambda s: s, "the state of a program"),
        (lambda s: s.text, "the state of a program"),
        (lambda s: s.fork(2), "a fork of 2"),
        (lambda s: s.copy(), "a copy of a state"),
        (lambda s: s.stream_executor, "the executor of a program"),
        (lambda s: s.var_scope("v").__enter__, "a block for `with`"),
        (lambda s: sgl.function(lambda s: None), "the program <lambda>"),
    ],
)
def test_what_python_shows_for_debuggers_is_refused_as_text_of_a_program(make, form, thing, what):
    @sgl.function
    def program(s):
        shown = form(thing(s))
        s._block = None  # a block that is only shown
        assert "#" in shown
        s += "before " + shown

    with pytest.raises(sgl.ExpressionError, match=rf"^{what} has no text .* repr\(\)"):
        program.run(backend=make())


def test_what_is_shown_is_no_choice_and_no_part_of_an_expression_either():
    for write in (
        lambda text: sgl.select("x", ["a", text]),
        lambda text: sgl.gen("y") + text,
        lambda text: text + sgl.gen("y"),
        lambda text: sgl.user([text]),
    ):
        with pytest.raises(sgl.ExpressionError, match=r"gen\('x'\) has no text"):
            write(f"{_ITEM!r}")


def test_text_that_only_looks_like_what_is_shown_is_text(make):
    @sgl.function
    def program(s):
        s += "<jserve: gen('x') #0123456789ab> <jserve.lang.state.ProgramState object at 0>"

    assert program.run(backend=make()).text().startswith("<jserve: gen")


def test_a_trace_ends_where_python_shows_an_argument():
    @sgl.function
    def program(s, country):
        s += "Tell me about "
        s += f"{country!r}, please."

    trace = program.trace()
    assert trace.prefix == "Tell me about " and trace.steps[-1].kind == "end"
    assert "the argument country has no text" in trace.steps[-1].text


@pytest.mark.parametrize(
    ("thing", "what"),
    [(lambda s: s.fork(2), "a fork of 2"), (lambda s: s.copy(), "a copy of a state")],
)
def test_a_trace_ends_where_python_shows_branches(thing, what):
    @sgl.function
    def program(s):
        s += f"{thing(s)}, please."

    last = program.trace().steps[-1]
    assert last.kind == "end" and f"{what} has no text" in last.text


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
        (lambda: untyped.gen("x", return_logprob="x"), "return_logprob must be true or false"),
        (lambda: untyped.gen("x", logprob_start_len="x"), "logprob_start_len must be an integer"),
        (lambda: sgl.gen("x", top_logprobs_num=-1), "top_logprobs_num must be in [0, "),
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


@pytest.mark.parametrize(
    ("expr", "script", "kept", "reason"),
    [
        (lambda: sgl.gen("x", regex="[a-z]{8}", stop="e"), "abcdefgh", "abcd", "e"),
        (lambda: sgl.gen("x", regex="[a-z]{8}", stop="e"), "abcde", "abcd", "e"),
        (lambda: sgl.gen("x", regex="[a-z]{8}", stop="e"), "abcd", "abcd", "e"),
        (lambda: sgl.gen("x", regex="[a-z]{8}", stop="e"), "abcd3fgh", None, None),
        (lambda: sgl.gen("x", regex="[a-d]{8}", stop="e"), "abcd", None, None),
        (lambda: sgl.gen("x", regex="[a-z]{8}", stop_regex="[ef]"), "abcdefgh", "abcd", "[ef]"),
        (lambda: sgl.gen("x", stop_regex=["x+", r"\d\d"]), "a 1 b 22 c", "a 1 b ", r"\d\d"),
        (lambda: sgl.gen("x", regex="[a-z]{8}", max_tokens=3), "abc", "abc", "length"),
        (lambda: sgl.gen("x", regex="[a-z]{8}", max_tokens=4), "abc", None, None),
        (lambda: sgl.gen_string("x", stop="b"), '"abc"', '"a', "b"),
        (lambda: sgl.gen_int("x"), "12 apples", "12", " "),
        (lambda: sgl.gen("x", regex="[a-z]{8}"), "abc", None, None),
    ],
)
def test_a_script_may_answer_what_a_stop_or_the_limit_cuts(make, expr, script, kept, reason):
    @sgl.function
    def program(s):
        s += "q" + expr()

    state = program.run(backend=make({"x": script}))
    if kept is None:
        assert f"{script!r}, does not match its regex" in str(state.error())
        return
    assert state.error() is None and state["x"] == kept and state.text() == "q" + kept
    finish = state.get_meta_info("x")["finish_reason"]
    assert reason in (finish.get("matched"), finish["type"]), finish


# Expressions that cannot be written so.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "a"),
        ("json_schema", {}),
        ("dtype", int),
        ("n", 2),
        ("stop", "a"),
        ("max_tokens", 3),
        ("min_tokens", 1),
        ("return_logprob", True),
        ("top_p", 0.5),
    ],
)
def test_choices_say_which_parameter_cannot_go_with_them(field, value):
    with pytest.raises(sgl.ExpressionError, match=f"^gen: {field} cannot go with choices"):
        untyped.gen("x", choices=["a", "b"], **{field: value})


def test_n_of_a_run_is_for_its_gens_and_a_select_has_one_answer(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x") + sgl.select("y", ["a", "b"])

    state = program.run(n=2, backend=make({"x": ["1", "2"]}))
    assert state["x"] == ["1", "2"] and state["y"] == "a" and state.text() == "q1a"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pattern", [r"\u{41}", r"\p{L}", r"\cA", "(?<n>a)", "[a&&b]"])
def test_a_regex_is_what_the_server_takes_not_what_python_does(pattern):
    assert isinstance(sgl.gen("x", regex=pattern), Expr)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", "[z-a]", r"(a)\1"])
def test_a_regex_that_no_server_takes_is_refused_at_its_line(pattern):
    with pytest.raises(sgl.ExpressionError, match=r"^gen: regex .* cannot be used: .* at position"):
        sgl.gen("x", regex=pattern)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: untyped.gen("x", regex=3), "regex must be a text, got 3"),
        (lambda: untyped.gen("x", json_schema=3), "json_schema must be a dict or text, got 3"),
        (lambda: untyped.gen("x", stop=3), "stop must be a text or a list of texts, got 3"),
        (lambda: untyped.gen("x", stop=[3]), "stop must be a text or a list of texts"),
        (lambda: untyped.gen("x", stop_regex=3), "stop_regex must be a text or a list of texts"),
        (lambda: untyped.gen("x", stop_token_ids=3), "stop_token_ids must be a list of token ids"),
        (
            lambda: untyped.gen("x", stop_token_ids="3"),
            "stop_token_ids must be a list of token ids",
        ),
        (lambda: untyped.gen("x", choices_method=sgl.greedy_token_selection), "needs choices"),
        (lambda: untyped.select("x", (c for c in ())), "select needs a list of texts"),
        (lambda: untyped.TestBackend({"x": 3}), r"the answer for 'x' must be a text, .* got 3"),
        (lambda: untyped.TestBackend({"x": ["a", 3]}), "the answer for 'x' must be a text"),
        (lambda: untyped.TestBackend(3), "TestBackend: answers must be a dict"),
        (lambda: untyped.set_default_backend(3), r"backend=3 is none: pass an Engine"),
    ],
)
def test_what_is_of_a_wrong_kind_is_told_by_name(write, message):
    with pytest.raises(sgl.ExpressionError, match=message):
        write()


def test_arguments_of_a_run_and_a_fork_are_told_by_name_too(make):
    @sgl.function
    def program(s, size):
        s.fork(size)

    with pytest.raises(sgl.ExpressionError, match="stop must be a text or a list of texts"):
        program.run(1, backend=make(), stop=3)
    with pytest.raises(sgl.ExpressionError, match=r"fork: size must be an integer in \[1, 10000\]"):
        program.run("2", backend=make())


def test_choices_may_come_from_a_generator():
    one = sgl.select("x", (c for c in "ab"))
    assert isinstance(one, Select) and one.choices == ("a", "b")


def test_a_function_of_a_script_that_gives_no_text_is_told(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")

    assert "x must give a text, got 3" in str(program.run(backend=make({"x": lambda _: 3})).error())


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


# Texts that cannot be.


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.__iadd__("a\ud800"),
        lambda s: s.__iadd__(sgl.user("a\ud800")),
        lambda s: s.__iadd__(sgl.select("x", ["a", "\ud800"])),
        lambda s: s.__iadd__(sgl.gen("x", stop="\ud800")),
        lambda s: s.__iadd__(sgl.gen("x", stop_regex=["a", "\ud800"])),
        lambda s: s.__iadd__(sgl.gen("x", regex="\ud800")),
        lambda s: s.__iadd__(sgl.gen("x", ebnf="\ud800")),
    ],
)
def test_half_a_character_is_told_where_it_is_written(make, write):
    with pytest.raises(sgl.ExpressionError, match=r"holds half of a surrogate pair.*\\ud800'"):
        sgl.function(lambda s: write(s)).run(backend=make())


def test_an_empty_regex_is_told_where_it_is_written():
    with pytest.raises(sgl.ExpressionError, match="regex '' cannot be used: it is empty"):
        sgl.gen("x", regex="")


def test_a_program_that_is_called_with_anothers_state_says_whose_it_has(make):
    @sgl.function
    def inner(s, word):
        s += word

    @sgl.function
    def outer(s):
        with pytest.raises(sgl.ExpressionError, match="1 argument, got 2: it has a state of its o"):
            inner(s, "Hi")
        return inner("Hi").text()

    backend = make()
    sgl.set_default_backend(backend)
    try:
        assert outer.run(backend=backend).ret_value == "Hi"
        assert outer.trace().ended is None
    finally:
        sgl.set_default_backend(None)


def test_each_of_n_answers_takes_its_own_of_the_script(make):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("one", n=2) + sgl.gen("two", n=2)

    state = program.run(backend=make({"one": "same", "two": ["a", "b"]}))
    assert state["one"] == ["same", "same"] and state["two"] == ["a", "b"]
    short = program.run(backend=make({"one": "same", "two": ["a"]}))
    assert "the script has only 1 answers for 'two'" in str(short.error())
