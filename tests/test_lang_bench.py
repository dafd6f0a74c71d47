"""`jserve bench program` on an engine whose next token is a formula; the programs without one."""

from __future__ import annotations

import json

import pytest
from fake_engine import PAGE

import jserve.lang as sgl
from jserve.__main__ import main
from jserve.bench import commands
from jserve.bench.program import chosen, compare_work
from jserve.bench.programs import PROGRAMS, Work
from jserve.bench.programs.__main__ import main as run_programs
from jserve.bench.programs.agent import Library
from jserve.bench.programs.rag import retrieve
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(100)
INTRO = "An introduction that every program of this batch shares, in a few words more than needed. "


@sgl.function
def small(s, number, scale=1):
    s += INTRO * scale + "Number "
    s += str(number) + ":"
    branches = s.fork(2)
    branches += lambda i: f"{i}" + sgl.gen("x", max_tokens=3)
    branches.join()
    s += sgl.select("best", ["a", "b"])


WORK = Work("small", "a test", small, [{"number": i} for i in range(4)], lambda s: str(s["x"]))


@pytest.fixture(scope="module")
def engine():
    tokenizer = Tokenizer(byte_source(256))
    with Engine("fake", inline=True, builder="tests.fake_engine:build", tokenizer=tokenizer) as one:
        yield one


def test_the_arms_differ_in_reuse_and_not_in_answers(engine):
    result = compare_work(engine, WORK, 1)
    flat, radix, program = (result["arms"][name] for name in ("flat", "flat-radix", "program"))
    length = len(INTRO) + len("Number 0:")
    branches, choices = 2 * (length + 1), 2 * (length + 1)
    assert flat["prefill_tokens"] == 4 * (branches + choices)
    assert program["prefill_tokens"] < radix["prefill_tokens"] <= flat["prefill_tokens"]
    tail = PAGE + len("Number 0:0")
    assert program["prefill_tokens"] <= len(INTRO) + len("Number ") + 4 * (6 * tail)
    assert result["different_answers"] == 0
    assert result["prefill_ratio"] == program["prefill_tokens"] / flat["prefill_tokens"]
    assert flat["generated_tokens"] == 4 * 2 * 3


def test_the_command_prints_one_line_of_json(engine, monkeypatch, capsys):
    class Kept:
        def __enter__(self):
            return engine

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(commands, "_engine", lambda config: Kept())
    monkeypatch.setitem(PROGRAMS, "small", WORK)
    argv = ["bench", "program", "fake", "--programs", "small", "--items", "2", "--repeat", "2"]
    assert main(argv) == 0
    (one,) = json.loads(capsys.readouterr().out)["programs"]
    assert (one["name"], one["items"]) == ("small", 2)
    assert set(one["arms"]["program"]) >= {"prefill_tokens", "wall_seconds", "calls"}


def test_what_the_command_refuses(capsys):
    assert main(["bench", "program", "fake", "--programs", "agnet"]) == 2
    assert "--programs knows agent, tree-of-thought" in capsys.readouterr().err
    assert main(["bench", "program", "fake", "--repeat", "0"]) == 2
    with pytest.raises(ConfigError, match="--items must be >= 1"):
        chosen(None, 0)
    with pytest.raises(ConfigError, match="--scale must be >= 1, got 0"):
        chosen(None, 1, 0)
    with pytest.raises(SystemExit):
        run_programs(["rag", "--scale", "0"])


SCRIPT = {
    "plan": "a plan",
    "work": "work",
    "result": "7",
    "topic": " Sports",
    "country": " Peru\n",
    "population": " 1234\n",
    "facts": '{"name": "x", "country": "y", "population": 1, "large": false}',
    "answer": "It is.",
    "verdict": " useful",
    "argument": "Bergen",
    "action": [" search", " lookup", " finish"] * 9,
    **{f"answer_{i}": f"answer {i}" for i in range(4)},
    **{f"thought_{i}": f"thought {i}" for i in range(3)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_on_a_script_and_has_a_long_prefix(name):
    work = PROGRAMS[name]
    backend = sgl.TestBackend(SCRIPT)
    state = work.program.run(backend=backend, **work.items[0])
    assert state.error() is None and work.answer(state)
    assert len({json.dumps(item) for item in work.items}) == len(work.items) >= 3
    prefix = work.program.trace().prefix
    assert len(prefix) > 300, "a batch of it shares a prefix"
    backend.shutdown()


@pytest.mark.parametrize("name", PROGRAMS)
def test_prompts_grow_with_the_scale(name):
    texts = []
    for (work,) in (chosen([name], 1), chosen([name], 1, 3)):
        backend = sgl.TestBackend(SCRIPT)
        (state,) = work.program.run_batch(work.items, backend=backend)
        assert state.error() is None
        texts.append(state.text())
        backend.shutdown()
    assert 1.7 < len(texts[1]) / len(texts[0]) < 3.0


def test_the_tools_of_the_agent_and_of_retrieval():
    library = Library()
    assert library.use("lookup", "people") == "No sentence has that word."
    assert library.use("search", "Bergen").startswith("Bergen lies on the west coast")
    assert "290000 people" in library.use("lookup", "People")
    assert library.use("search", "Atlantis") == "Nothing was found."
    assert retrieve("What holds up the pines in Kanazawa?")[0].name == "Kanazawa"
