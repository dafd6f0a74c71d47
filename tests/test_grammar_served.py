"""Real schemas and regular expressions through a real server: what a small model writes at
temperature 1 is valid, and nearly all of it comes to an end."""

from __future__ import annotations

import json
import time

import grammar_suites as suites
import pytest
import served_grammars
from grammar_suites import BYTES
from grammar_traffic import answers, table

from jserve.grammar.choice import make_backend
from tests.server_process import serving

CONCURRENCY = 16
MOST_TOKENS = 768
FLAGS = ("--chunked-prefill-size", "64", "--max-running-requests", "32", "--enable-metrics")


def test_60_schemas_and_60_regexes_of_all_families_are_committed_with_right_examples() -> None:
    cases = served_grammars.committed()
    backend = make_backend("llguidance", BYTES)
    families = [case.family for case in cases]
    wanted = {"json": served_grammars.SCHEMAS, "regex": served_grammars.REGEXES}
    for kind, numbers in wanted.items():
        assert sum(case.kind == kind for case in cases) == 60
        assert all(families.count(family) == number for family, number in numbers.items())
    assert len({(case.kind, case.name) for case in cases}) == 120
    assert sum(not case.examples for case in cases) <= 2
    for case in cases:
        template = backend.load(backend.compile(case.spec))
        for example in case.examples:
            assert suites.accepts(template, example), (case.name, example)


@pytest.mark.full
def test_the_committed_choice_is_the_one_that_the_rule_makes() -> None:
    assert list(served_grammars.committed()) == served_grammars.chosen()


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_what_a_model_writes_at_temperature_1_is_valid_and_most_of_it_ends() -> None:
    cases = served_grammars.committed()
    with serving("--model-path", "smollm2-135m", *FLAGS, timeout=1200.0) as client:
        began = time.monotonic()
        found = answers(client, cases, CONCURRENCY, MOST_TOKENS)
        took = time.monotonic() - began
        info = client.get("/server_info").json()["internal_states"][0]
        metrics = client.get("/metrics").text
    print(f"\n{table(found)}\n{len(found)} answers in {took:.0f} s, {CONCURRENCY} at a time")
    faults = {one.case.name: (one.fault, one.finish, one.text) for one in found if one.fault}
    assert not faults, json.dumps(faults, ensure_ascii=False, indent=1)
    for kind in ("json", "regex"):
        ended = [one.ended for one in found if one.case.kind == kind]
        assert sum(ended) >= 50 and len(ended) == 60, (kind, sum(ended))
    assert metric(metrics, "grammar_rows_masked_total") >= sum(one.num_tokens for one in found)
    assert metric(metrics, "grammar_compilation_time_seconds_count") >= 110
    assert info["recompiles_total"] == 0
    free, cached = info["kv_available_tokens"], info["kv_evictable_tokens"]
    assert free + cached == info["max_total_num_tokens"], info


def metric(page: str, name: str) -> float:
    """The sum of a series over its labels."""
    lines = [line for line in page.splitlines() if line.partition("{")[0].endswith(f":{name}")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)
