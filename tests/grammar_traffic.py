"""Answers to served_grammars' cases by a server, and what jsonschema and `re` make of them.

Knows HTTP, and grammars over bytes; nothing of the engine. Answers are taken as they come.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grammar_suites as suites
import httpx
import numpy as np
from grammar_suites import BYTES
from served_grammars import Case

from jserve.grammar.backend import Backend
from jserve.grammar.choice import make_backend

_SHOTS = 4  # a model of this size copies no better with fewer


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    case: Case
    text: str
    finish: dict[str, Any]
    num_tokens: int
    seconds: float
    fault: str  # what is wrong with it, "" if nothing

    @property
    def ended(self) -> bool:
        return self.finish["type"] == "stop"


def answers(
    client: httpx.Client, cases: Sequence[Case], concurrency: int, most_tokens: int
) -> list[Answer]:
    """All cases at temperature 1, by turns through /generate and /v1/chat/completions; each with
    a seed of its own."""
    ask = {0: _native, 1: _chat}

    def one(at: int) -> tuple[str, dict[str, Any], int, float]:
        began = time.perf_counter()
        got = ask[at % 2](client, cases[at], at, most_tokens)
        return *got, time.perf_counter() - began

    with ThreadPoolExecutor(concurrency) as pool:
        raw = list(pool.map(one, range(len(cases))))
    backend = make_backend("llguidance", BYTES)
    return [
        Answer(case, *got, fault=_fault(backend, case, got[0], got[1], got[2], most_tokens))
        for case, got in zip(cases, raw, strict=True)
    ]


def table(found: Iterable[Answer]) -> str:
    """A line for each family: cases, those that ended and how many of them are valid; those cut
    off, and how many of them begin a valid text; tokens; seconds of the median and the slowest."""
    rows: dict[tuple[str, str], list[Answer]] = collections.defaultdict(list)
    for one in found:
        rows[one.case.kind, one.case.family].append(one)
        rows[one.case.kind, "all"].append(one)
    lines = ["kind   family     cases  ended valid   cut valid  tokens  median s  slowest s"]
    for (kind, family), of_one in sorted(rows.items(), key=lambda row: (row[0][0], len(row[1]))):
        ended, cut = ([a for a in of_one if a.ended is which] for which in (True, False))
        right = [sum(not a.fault for a in part) for part in (ended, cut)]
        seconds = [a.seconds for a in of_one]
        lines.append(
            f"{kind:6} {family:9} {len(of_one):6} {len(ended):6} {right[0]:5} {len(cut):5} "
            f"{right[1]:5} {sum(a.num_tokens for a in of_one):7} "
            f"{statistics.median(seconds):9.1f} {max(seconds):10.1f}"
        )
    return "\n".join(lines)


# ---- asking


def _turns(case: Case) -> list[dict[str, str]]:
    """A talk in which each answer was as its example; the next is to be given."""
    what = case.what + (" as JSON" if case.kind == "json" else "")
    if not case.examples:
        return [{"role": "user", "content": f"Write {what}"}]
    turns = []
    for example in itertools.islice(itertools.cycle(case.examples), _SHOTS + 1):
        turns.append({"role": "user", "content": f"Write {what} like this: {example}"})
        turns.append({"role": "assistant", "content": example})
    return turns[:-1]


def _native(
    client: httpx.Client, case: Case, seed: int, most_tokens: int
) -> tuple[str, dict[str, Any], int]:
    field = {"json": "json_schema", "regex": "regex"}[case.kind]
    turns = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in _turns(case))
    body = {
        "text": "".join(turns) + "<|im_start|>assistant\n",
        "sampling_params": {
            **{"temperature": 1.0, "top_p": 1.0, "max_new_tokens": most_tokens},
            **{"sampling_seed": seed, field: case.text},
        },
    }
    answer = _post(client, "/generate", body)
    meta = answer["meta_info"]
    return answer["text"], meta["finish_reason"], meta["completion_tokens"]


def _chat(
    client: httpx.Client, case: Case, seed: int, most_tokens: int
) -> tuple[str, dict[str, Any], int]:
    body = {
        **{"model": "default", "messages": _turns(case), "seed": seed},
        **{"temperature": 1.0, "top_p": 1.0, "max_completion_tokens": most_tokens},
    }
    if case.kind == "json":
        named = {"name": "answer", "schema": json.loads(case.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    else:
        body["regex"] = case.text
    answer = _post(client, "/v1/chat/completions", body)
    [choice] = answer["choices"]
    finish = {"type": choice["finish_reason"]}
    return choice["message"]["content"], finish, answer["usage"]["completion_tokens"]


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, (path, reply.text[:2000])
    return reply.json()


# ---- judging


def _fault(
    backend: Backend,
    case: Case,
    text: str,
    finish: dict[str, Any],
    num_tokens: int,
    most_tokens: int,
) -> str:
    """A text that ended must be valid, by the other opinion and by the grammar over bytes; one that
    was cut off must have all its tokens, and be the beginning of a text of the grammar."""
    template = backend.load(backend.compile(case.spec))
    if finish["type"] == "stop":
        if not _valid(case, text):
            return "invalid"
        return "" if suites.accepts(template, text) else "not of the grammar"
    if finish["type"] != "length":
        return f"ended by {finish}"
    if num_tokens != most_tokens:
        return f"cut off after {num_tokens} tokens"
    matcher, row = template.fork(), np.zeros(BYTES.words, np.int32)
    whole = text.rstrip("\ufffd")  # the last character may lack bytes
    if not all(matcher.accept(byte) for byte in whole.encode()):
        return "begins no text of the grammar"
    if not matcher.finished:
        matcher.fill(row)
    return "" if matcher.finished or row.any() else "cannot go on"


def _valid(case: Case, text: str) -> bool:
    if case.kind == "regex":
        return re.fullmatch(case.text, text) is not None
    try:
        return suites.is_valid(_checks(case.text), text)
    except ValueError:
        return False


@functools.cache
def _checks(schema: str) -> Any:
    return suites.validator(json.loads(schema))
