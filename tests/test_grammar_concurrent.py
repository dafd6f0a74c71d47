"""Bound and free requests together on the real engine, some of them cancelled: what is finished
follows its grammar, what is free answers as alone, nothing is compiled and all is given back.

A tiny random model with a real tokenizer: what it would say is noise, so each grammar bounds its
own length.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from soak_traffic import CONTEXT, SHAPE

from jserve.engine.engine import Engine

NUM_REQUESTS = 64
NUM_GRAMMARS = 16
NEAR_TIE = 0.01  # nats: float32 rounds differently in another bucket


def grammars() -> list[tuple[dict[str, Any], Any]]:
    """(sampling parameters, what its answers must satisfy)"""
    forms: list[tuple[dict[str, Any], Any]] = []
    for i in range(NUM_GRAMMARS // 2):
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3 + i},
                "kind": {"enum": ["a", "b", i]},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
        forms.append(({"json_schema": schema}, schema))
    for i in range(NUM_GRAMMARS // 2):
        pattern = rf"[a-z]{{{3 + i}}}(-\d\d){{1,3}};{i}"
        forms.append(({"regex": pattern}, re.compile(pattern)))
    return forms


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    with Engine(
        model_path=str(path),
        load_format="dummy",
        tokenizer_path="smollm2-135m",
        context_length=CONTEXT,
        max_running_requests=16,
        max_total_tokens=1024,
        chunked_prefill_size=48,
        schedule_conservativeness=0.05,
        recompile_guard="error",
    ) as engine:
        while engine.get_server_info()["programs_pending"]:
            asyncio.run(asyncio.sleep(0.2))
        yield engine


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 40_000) for _ in range(rng.choice((8, 30, 70)))]


async def ask(
    engine: Engine, ids: list[int], params: dict[str, Any], start: float, leaves: bool
) -> dict[str, Any] | None:
    """The answer; None for a client that left."""
    await asyncio.sleep(start)
    stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
    bodies: list[dict[str, Any]] = []
    async for body in stream:
        bodies.append(body)
        if leaves and len(bodies) == 3:
            await stream.aclose()
            return None
    return bodies[-1]


def check(body: dict[str, Any], rule: Any) -> None:
    text, finish = body["text"], body["meta_info"]["finish_reason"]
    assert finish["type"] == "stop", (text, finish)
    if isinstance(rule, re.Pattern):
        assert rule.fullmatch(text), text
    else:
        jsonschema.validate(json.loads(text), rule)


def test_64_requests_half_of_them_bound_by_16_grammars_with_cancels(engine: Engine) -> None:
    rng, forms = random.Random(7), grammars()
    calls = []
    for i in range(NUM_REQUESTS):
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
        rule = None
        if i % 2:
            more, rule = forms[i // 2 % NUM_GRAMMARS]
            params = {"temperature": rng.choice((0.0, 1.0)), "max_new_tokens": 200} | more
        calls.append((prompt(rng), params, rng.uniform(0, 0.5), i % 8 in (3, 6), rule))

    async def all_of_them() -> list[dict[str, Any] | None]:
        return await asyncio.gather(*(ask(engine, *call[:4]) for call in calls))

    before = engine.get_server_info()
    bodies = asyncio.run(all_of_them())
    bound = free = left = 0
    for body, (ids, params, _, leaves, rule) in zip(bodies, calls, strict=True):
        if body is None:
            assert leaves
            left += 1
        elif rule is not None:
            check(body, rule)
            bound += 1
        else:
            free += 1
            alone = engine.generate(
                input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=2
            )
            same_up_to_near_ties(body, alone)
    assert left >= 12 and bound >= 20 and free >= 20, (left, bound, free)
    info = engine.get_server_info()
    masked = info["grammar_rows_masked_total"] - before.get("grammar_rows_masked_total", 0)
    assert masked >= 20 * 8, masked
    assert info["recompiles_total"] == 0 and info["num_running_reqs"] == 0
    assert info["cache_active_references"] == 0
    free_tokens = info["kv_available_tokens"] + info["kv_evictable_tokens"]
    assert free_tokens == info["max_total_num_tokens"]


def same_up_to_near_ties(body: dict[str, Any], alone: dict[str, Any]) -> None:
    ours, theirs = body["output_ids"], alone["output_ids"]
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            (best, _, _), (second, second_id, _) = alone["meta_info"]["output_top_logprobs"][i]
            assert best - second < NEAR_TIE and second_id == one, (i, one, other)
            return


def test_a_grammar_holds_through_retractions(engine: Engine) -> None:
    """Long answers of many at once, in a pool that cannot hold them."""
    before = engine.get_server_info()["num_retracted_requests_total"]
    regex = r"(\d{20} ){5}\."  # a digit is a token
    engine.generate("compile it first", {"regex": regex, "max_new_tokens": 1})

    async def one(i: int, gap: float) -> dict[str, Any]:
        await asyncio.sleep(gap * i)
        params = {"temperature": 1.0, "max_new_tokens": 140, "regex": regex}
        return await engine.async_generate(input_ids=[5 + i] * 8, sampling_params=params)

    async def all_of_them(gap: float) -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(i, gap) for i in range(24)))

    for gap in (0.005, 0.01, 0.002, 0.02, 0.04):  # who is retracted is a matter of timing
        for body in asyncio.run(all_of_them(gap)):
            check(body, re.compile(regex))
        info = engine.get_server_info()
        if info["num_retracted_requests_total"] > before:
            break
    assert info["num_retracted_requests_total"] > before
    assert info["recompiles_total"] == 0 and info["cache_active_references"] == 0
