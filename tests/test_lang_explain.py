"""`jserve lang explain`: the tree of a program, and of a run of it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from native_server import NativeServer, running

import jserve.lang as sgl
from jserve.__main__ import main
from jserve.lang import tracing
from jserve.lang.explain import as_html, as_text, lines_of

PROGRAM = """
import jserve.lang as sgl

@sgl.function
def essay(s, topic, tone="dry"):
    s += sgl.system("You are a writer who knows a lot about the world & says it <briefly>.")
    s += sgl.user("Write about " + topic)
    branches = s.fork(2)
    branches += lambda i: sgl.assistant(f"{i}: " + sgl.gen("draft", max_tokens=6, stop="!"))
    branches.join()
    s += sgl.user("Better:\\n" + s["draft"][0])
    s += sgl.assistant(sgl.select("best", ["first", "second"]) + sgl.gen("n", dtype=int))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "essays.py"
    path.write_text(PROGRAM)
    return path


def test_the_tree_of_a_program_needs_no_backend(file, capsys):
    assert main(["lang", "explain", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "essay"
    assert lines[1].startswith("├═ text     'SYSTEM:You are a writer") and "essays.py:6" in lines[1]
    text = "\n".join(lines)
    for part in (
        "├─ argument topic  essays.py:7",
        "├─ fork     into 2  essays.py:8",
        "│  ├─ branch   1",
        "│  │  ├─ gen      draft  essays.py:9",
        "├─ variable draft  essays.py:11",
        "├─ select   best (token_length_normalized of 2: first, second)  essays.py:12",
        "├─ gen      n (dtype int)  essays.py:12",
    ):
        assert part in text, text
    assert "reused" not in text


def test_the_tree_of_a_run_shows_what_each_place_reused(file, capsys, tmp_path):
    page = tmp_path / "essay.html"
    server = NativeServer()
    with running(server.app) as url:
        argv = ["lang", "explain", str(file), "--url", url, "--html", str(page)]
        assert main([*argv, "--args", '{"topic": "rain"}']) == 0
    text = capsys.readouterr().out
    assert "commit   shared by 2 branches  [0 reused, 99 computed]" in text
    assert "├═ text     'SYSTEM:" in text and "Write about '" in text
    assert "├─ text     'rain" in text  # what is an argument is not of every run
    assert "gen      draft = '" in text and "[99 reused, 13 computed, 6 generated]" in text
    assert " calls: " in text.splitlines()[-2]
    markup = page.read_text()
    assert "iefly&gt;" in markup and "<script" not in markup
    svgs = markup.split("<svg")[1:]
    assert len(svgs) == 5
    drawn = ElementTree.fromstring("<svg" + svgs[0].split("</svg>")[0] + "</svg>")
    widths = [float(shape.get("width")) for shape in drawn]
    assert widths[0] == 0 and widths[1] > 0  # nothing reused, something computed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--args", "{"], "--args is not JSON"),
        (["--args", "[]"], "--args must be a JSON object"),
        (["--args", '{"subject": 1}'], "--args: essay takes topic, tone, not subject"),
        (["--url", "http://127.0.0.1:9"], "--args lacks topic: a run needs every argument"),
        (["--function", "poem"], "has no program poem; it has: essay"),
    ],
)
def test_what_is_wrong_is_one_line(file, argv, message, capsys):
    assert main(["lang", "explain", str(file), *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_that_is_not_there_or_holds_no_python_or_many_programs(tmp_path, capsys):
    path = tmp_path / "p.py"
    assert main(["lang", "explain", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["lang", "explain", str(tmp_path)]) == 2
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err
    path.write_text("def (")
    assert main(["lang", "explain", str(path)]) == 2
    assert f"{path}:1: " in capsys.readouterr().err
    path.write_text(PROGRAM + PROGRAM.replace("essay", "poem"))
    assert main(["lang", "explain", str(path)]) == 2
    assert "choose one with --function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\ndef f():\n    raise LookupError('no\\nluck')\nf()",
            ":3: LookupError: no luck",
        ),
        ("import no_such_module", ":1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("open('/no/such/file')", ":1: FileNotFoundError: "),
        ("exit(3)", ": SystemExit: 3"),
        ("\0", "null bytes"),
        ("x = '\udcff'", "utf-8"),
        (
            "import jserve.lang as sgl\n@sgl.function\ndef f(state): pass",
            ":2: ExpressionError: the first argument of f must be called s.",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line_with_its_own_line(
    tmp_path, text, message, capsys
):
    path = tmp_path / "p.py"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["lang", "explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize("page", ["no/such/folder/x.html", "."])
def test_a_page_that_cannot_be_written_is_told_before_the_run(file, page, capsys):
    argv = ["lang", "explain", str(file), "--html", str(file.parent / page)]
    assert main([*argv, "--url", "http://127.0.0.1:9", "--args", '{"topic": "x"}']) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert f"--html {file.parent / page}: " in captured.err


def test_a_run_that_fails_is_one_line_with_the_place(file, capsys):
    file.write_text(PROGRAM.replace("max_tokens=6", "top_p=2"))
    with running(NativeServer().app) as url, pytest.warns(sgl.ProgramWarning):
        assert main(["lang", "explain", str(file), "--url", url, "--args", '{"topic": "x"}']) == 1
    assert "essays.py:9" in capsys.readouterr().err


def test_pictures_of_the_same_steps_agree():
    backend = sgl.TestBackend({"a": "x" * 100})

    @sgl.function
    def program(s):
        s += "y" * 100 + sgl.gen("a")

    steps = program.run(backend=backend).steps
    backend.shutdown()
    assert [line.kind for line in lines_of(steps)] == ["text", "gen"]
    assert "(100 characters)" in as_text("p", steps)
    assert as_html("<p>", steps).count("<tr") == 2 and "<p>" in as_html("p", steps)
    assert "<title>&lt;p&gt;</title>" in as_html("<p>", steps)


GUIDE = Path(__file__).parents[1] / "docs" / "language.md"


def test_the_guides_own_example_is_shown_whole(tmp_path, capsys):
    blocks = re.findall(r"^```python run\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    block = next(one for one in blocks if "def tips(" in one)
    path = tmp_path / "programs.py"
    path.write_text("import jserve.lang as sgl\n" + block[: block.index("\nstate")])
    for more in ([], ["--args", '{"topic": "tea"}']):
        assert main(["lang", "explain", str(path), "--function", "tips", *more]) == 0
        shown = capsys.readouterr()
        assert "├─ gen      end" in shown.out and "├─ end" not in shown.out and not shown.err


BROKEN = """
import jserve.lang as sgl

@sgl.function
def at_once(s, topic):
    s += f"On {topic}:" + sgl.gen("x")

@sgl.function
def later(s, topic):
    s += "On " + topic + ":" + sgl.gen("x")
    s += "".join([s["x"], "!"])

@sgl.function
def hangs(s, topic):
    s += "On " + topic
    while True:
        pass
"""


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return path


def test_a_trace_that_cannot_begin_is_an_error_with_the_place_and_the_way_out(broken, capsys):
    assert main(["lang", "explain", str(broken), "--function", "at_once"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    for part in (
        "broken.py:6",
        "the argument topic has no value",
        "with +, not",
        "--args",
        "--url",
    ):
        assert part in shown.err
    argv = ["lang", "explain", str(broken), "--function", "at_once", "--args", '{"topic": "tea"}']
    assert main(argv) == 0 and "gen      x" in capsys.readouterr().out


def test_what_a_trace_found_before_it_ended_is_shown_with_the_place_of_its_end(broken, capsys):
    assert main(["lang", "explain", str(broken), "--function", "later"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"├─ gen +x +broken.py:10\n├─ end +TypeError: .* broken.py:11\n", shown.out)
    assert "the picture ends where the trace ended; --args gives" in shown.err


@pytest.mark.parametrize("more", [[], ["--args", '{"topic": "tea"}']])
def test_a_program_that_hangs_is_traced_once(broken, capsys, monkeypatch, more):
    monkeypatch.setattr(tracing, "MOST_SECONDS", 0.2)
    traces = []
    trace = tracing.trace
    monkeypatch.setattr(tracing, "trace", lambda *args: traces.append(1) or trace(*args))
    assert main(["lang", "explain", str(broken), "--function", "hangs", *more]) == 0
    shown = capsys.readouterr()
    assert re.search(r"├─ end +the program did not end .* broken.py:1[67]\n", shown.out)
    assert len(traces) == 1 and "--args" not in shown.err


def test_arguments_may_be_called_as_flags_and_parameters_are(tmp_path, capsys):
    path = tmp_path / "named.py"
    path.write_text(
        "import jserve.lang as sgl\n"
        "@sgl.function\n"
        "def named(s, temperature, backend, stream=0):\n"
        "    s += 'At ' + temperature + backend + sgl.gen('x', max_tokens=2)\n"
    )
    given = ["--args", '{"temperature": "noon", "backend": " here"}']
    assert main(["lang", "explain", str(path), *given]) == 0
    assert "text     'noon here'" in capsys.readouterr().out
    with running(NativeServer().app) as url:
        assert main(["lang", "explain", str(path), *given, "--url", url]) == 0
    assert "At '" in (shown := capsys.readouterr().out) and "noon here" in shown
