"""Random streaming traffic for a server of a tiny random model with a real tokenizer, and how its
answers are checked. Knows HTTP only, nothing of the engine behind it.

A finished greedy answer is checked by teacher forcing: prompt and output go back as one prompt,
under a salt of its own so that nothing cached is used, and every output token must be the likeliest
there, up to near ties; its log-probabilities must be those that the stream reported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

VOCAB = 49152
CONTEXT = 384
#: A model whose step costs little more than its HTTP traffic.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1024,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
MAX_OUTPUT = 120
URGENT = 20  # a priority; it interrupts those that are 10 below and more
NEAR_TIE = 0.01  # nats between the likeliest token and one that rounding may prefer
#: What is wrong with a request, and the field that the answer must name.
INVALID: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"input_ids": []}, {}, "input_ids"),
    ({"input_ids": [VOCAB]}, {}, "input_ids"),
    ({"input_ids": [5] * CONTEXT}, {}, "input_ids"),
    ({"no_such_field": 1}, {}, "no_such_field"),
    ({"return_logprob": True, "logprob_start_len": 1000}, {}, "logprob_start_len"),
    ({"return_logprob": True, "token_ids_logprob": [VOCAB]}, {}, "token_ids_logprob"),
    ({}, {"max_new_tokens": CONTEXT}, "max_new_tokens"),
    ({}, {"temperature": -1}, "temperature"),
    ({}, {"top_p": 0}, "top_p"),
    ({}, {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
    ({}, {"stop": ["x"] * 33}, "stop"),
    ({}, {"stop_token_ids": list(range(60))}, "stop_token_ids"),
    ({}, {"logit_bias": {str(VOCAB): 1.0}}, "logit_bias"),
    ({}, {"sampling_seed": 2**63}, "sampling_seed"),
    ({}, {"stream_interval": 2**31}, "stream_interval"),
    ({}, {"no_such_parameter": 1}, "no_such_parameter"),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request and its fate: finish; leave (the client) or abort (by id) after `moment` seconds;
    invalid, with the `field` that is. It begins after `start` seconds."""

    body: dict[str, Any]
    fate: str
    moment: float = 0.0
    field: str = ""
    start: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        return self.body["sampling_params"]


@dataclasses.dataclass(slots=True)
class Reply:
    """`answer`: the last event's, or the error's body. `left`: the client did not wait for it."""

    call: Call
    status: int = 0
    num_events: int = 0
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)
    left: bool = False

    @property
    def finish(self) -> dict[str, Any]:
        return self.answer["meta_info"]["finish_reason"]

    @property
    def output_ids(self) -> list[int]:
        return self.answer["output_ids"]


def make_calls(
    rng: random.Random,
    count: int,
    *,
    longest: float,
    priorities: bool = True,
    outputs: Sequence[int] = (1, 8, 60, MAX_OUTPUT),
) -> list[Call]:
    """A third is cancelled within `longest` seconds, one in ten is invalid; in random order.

    With `priorities` some are of high priority and come late, when others run.
    """
    fates = ["leave"] * (count // 6) + ["abort"] * (count // 3 - count // 6)
    fates += ["invalid"] * (count // 10)
    fates += ["finish"] * (count - len(fates))
    rng.shuffle(fates)
    prefixes = [_random_ids(rng, rng.choice((40, 64, 110))) for _ in range(5)]
    calls = []
    for fate in fates:
        priority = rng.choice((0, 0, 0, 5, URGENT)) if priorities else None
        body, field = _body(rng, prefixes, rng.choice(outputs), priority), ""
        if fate == "invalid":
            fields, parameters, field = rng.choice(INVALID)
            body |= fields
            body["sampling_params"] |= parameters
        start = rng.uniform(1.0, 2.0) if priority == URGENT else 0.0
        calls.append(Call(body, fate, rng.uniform(0.0, longest), field, start))
    return calls


def growing_calls(rng: random.Random, count: int) -> list[Call]:
    """Requests that need little to start and then outgrow the pool, first in the queue."""
    sampling = {"temperature": 0, "max_new_tokens": MAX_OUTPUT}
    return [
        Call(_stream_body(rng, 3, sampling) | {"priority": URGENT - 10}, "finish")
        for _ in range(count)
    ]


def _body(
    rng: random.Random, prefixes: list[list[int]], output_len: int, priority: int | None
) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": output_len}
    body = _stream_body(rng, rng.choice((1, 3, 5, 10, 17, 32, 70, 150)), sampling)
    if rng.random() < 0.4:
        body["input_ids"] = rng.choice(prefixes) + body["input_ids"][:40]
    if rng.random() < 0.2:
        # few candidates: with all of the vocabulary rounding decides between neighbours
        sampling |= {"temperature": 0.8, "top_k": 20, "sampling_seed": rng.getrandbits(60)}
    elif rng.random() < 0.3:
        body |= {"return_logprob": True, "top_logprobs_num": rng.choice((0, 3))}
    if rng.random() < 0.2:
        sampling["stop"] = ["er", "ing", " a"]
    if rng.random() < 0.2:
        sampling["stop_token_ids"] = _random_ids(rng, 20)
    return body if priority is None else body | {"priority": priority}


def _stream_body(rng: random.Random, prompt_len: int, sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "rid": f"{rng.getrandbits(64):x}",
        "input_ids": _random_ids(rng, prompt_len),
        "stream": True,
        "sampling_params": sampling,
    }


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


async def send(client: httpx.AsyncClient, call: Call) -> Reply:
    """One call from its request to its fate."""
    reply = Reply(call)
    await asyncio.sleep(call.start)
    if call.fate == "leave":
        try:
            async with asyncio.timeout(call.moment):
                await _stream(client, reply)
        except TimeoutError:
            reply.left = True
        return reply
    stream = asyncio.create_task(_stream(client, reply))
    if call.fate == "abort":
        await asyncio.wait((stream,), timeout=call.moment)
        if not stream.done():
            done = await client.post("/abort_request", json={"rid": call.body["rid"]})
            assert done.status_code == 200, done.text
    await stream
    return reply


async def _stream(client: httpx.AsyncClient, reply: Reply) -> None:
    last = ""
    async with client.stream("POST", "/generate", json=reply.call.body) as response:
        reply.status = response.status_code
        if response.status_code != 200:
            reply.answer = json.loads(await response.aread())
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last, reply.num_events = line, reply.num_events + 1
    reply.answer = json.loads(last.removeprefix("data: "))


def check_fates(replies: Sequence[Reply]) -> list[Reply]:
    """Assert that every call met its fate; → those that finished by themselves."""
    finished = []
    for reply in replies:
        call = reply.call
        if call.fate == "invalid":
            assert reply.status == 400, (call, reply)
            assert call.field in json.dumps(reply.answer), (call.field, reply.answer)
        elif not reply.left:
            assert reply.status == 200 and "meta_info" in reply.answer, (call, reply)
            kind = reply.finish["type"]
            assert kind in (("abort", "stop", "length") if call.fate == "abort" else ENDS), reply
            if kind != "abort":
                _check_end(reply)
                finished.append(reply)
    return finished


ENDS = ("stop", "length")


def _check_end(reply: Reply) -> None:
    """The reason given is the one that the tokens and the text show."""
    sampling, ids, reason = reply.call.sampling, reply.output_ids, reply.finish
    assert ids and reply.answer["meta_info"]["completion_tokens"] == len(ids), reply
    stop_strings, stop_ids = sampling.get("stop", []), [2, *sampling.get("stop_token_ids", [])]
    assert not any(stop in reply.answer["text"] for stop in stop_strings), reply
    assert not any(token in stop_ids for token in ids[:-1]), reply
    if reason["type"] == "length":
        assert len(ids) == sampling["max_new_tokens"] == reason["length"], reply
    else:
        assert reason["matched"] in (*stop_strings, ids[-1]), reply


async def check_greedy(client: httpx.AsyncClient, reply: Reply) -> None:
    """Teacher forcing, as above; for greedy replies."""
    prompt, output = reply.call.body["input_ids"], reply.output_ids
    body = {
        "input_ids": prompt + output,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt),
        "top_logprobs_num": 1,
        "cache_salt": reply.call.body["rid"],
    }
    done = await client.post("/generate", json=body)
    assert done.status_code == 200, done.text
    meta = done.json()["meta_info"]
    chosen, best = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert meta["cached_tokens"] == 0 and len(chosen) == len(best) == len(output)
    assert [token for _, token, _ in chosen] == output
    for (value, token, _), ((top, top_token, _), *_) in zip(chosen, best, strict=True):
        assert value >= top - NEAR_TIE, (reply, token, value, top_token, top)
    if reply.call.body.get("return_logprob"):
        told = reply.answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in told] == output
        worst = max(abs(a[0] - b[0]) for a, b in zip(told, chosen, strict=True))
        assert worst < 0.002, (reply, worst)


async def equals_solo(client: httpx.AsyncClient, reply: Reply) -> bool:
    """Whether the same request gives the same tokens when nothing else runs."""
    done = await client.post("/generate", json=reply.call.body | {"stream": False})
    assert done.status_code == 200, done.text
    return done.json()["output_ids"] == reply.output_ids


async def wait_idle(client: httpx.AsyncClient, seconds: float = 20.0) -> dict[str, Any]:
    """The engine's numbers once nothing runs or waits."""
    for _ in range(int(seconds / 0.1)):
        info = (await client.get("/server_info")).json()["internal_states"][0]
        if not info["num_running_reqs"] and not info["num_queue_reqs"]:
            return info
        await asyncio.sleep(0.1)
    raise AssertionError(f"still busy: {info}")
