"""One request for n sequences: their ids, n Submits, and its prompt computed once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from jserve.config import CacheOptions
from jserve.engine.client import EngineClient
from jserve.engine.route import Route
from jserve.engine.warm_up import MIN_SHARED, prefix_of, reusable, warm_up
from jserve.types import Submit


def sequence_ids(rid: str, n: int) -> list[str]:
    """The ids of the sequences of one request."""
    return [rid] if n == 1 else [f"{rid}_{i}" for i in range(n)]


async def fan_out(
    submit: Submit, claims: Sequence[Route], client: EngineClient, cache: CacheOptions
) -> list[Submit]:
    """A sequence for each of the `claims`, with a seed of its own. With a prefix cache, once a long
    prompt is in it. Raises what the request is refused with."""
    cached = not cache.disable_radix_cache
    if cached and len(claims) > 1 and reusable(submit) >= MIN_SHARED:
        rid = f"{submit.rid}_warm_{uuid.uuid4().hex}"  # what aborts all sequences aborts it
        await warm_up(client, [prefix_of(submit, rid, len(submit.prompt_ids))], claims)
    seed, parts = submit.sampling.sampling_seed, []
    for i, route in enumerate(claims):
        own = None if seed is None else (seed + i + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(submit.sampling, n=1, sampling_seed=own)
        parts.append(msgspec.structs.replace(submit, rid=route.rid, sampling=sampling))
    return parts
