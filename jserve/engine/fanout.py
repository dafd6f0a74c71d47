"""One request for n > 1 sequences: n Submits, and its prompt computed once."""

from __future__ import annotations

import msgspec

from jserve.engine.client import EngineClient
from jserve.engine.refusals import raise_refusal
from jserve.types import SamplingParams, Submit

_LONG_PROMPT = 64  # tokens from which the prompt is computed before its sequences start


async def fan_out(submit: Submit, client: EngineClient, cached: bool) -> list[Submit]:
    """The n sequences, each with an id and a seed of its own. With a prefix cache (`cached`), once
    a long prompt is in it. Raises what the request is refused with."""
    if cached and len(submit.prompt_ids) >= _LONG_PROMPT:
        await _warm_up(submit, client)
    seed, parts = submit.sampling.sampling_seed, []
    for i in range(submit.sampling.n):
        own = None if seed is None else (seed + i + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(submit.sampling, n=1, sampling_seed=own)
        parts.append(msgspec.structs.replace(submit, rid=f"{submit.rid}_{i}", sampling=sampling))
    return parts


async def _warm_up(submit: Submit, client: EngineClient) -> None:
    rid, nothing = f"{submit.rid}_warm", SamplingParams(max_new_tokens=0)
    warm_up = msgspec.structs.replace(submit, rid=rid, sampling=nothing, logprobs=None)
    with client.open([warm_up]) as inbox:
        while (finish := (await inbox.get()).finish) is None:
            pass
        client.close(rid)
        raise_refusal(finish)
