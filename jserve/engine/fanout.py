"""One request for n > 1 sequences: n Submits, and its prompt computed once."""

from __future__ import annotations

import uuid

import msgspec

from jserve.engine.claims import claimed, forget, part_ids
from jserve.engine.client import EngineClient
from jserve.engine.warm_up import MIN_SHARED, prefix_of, reusable, warm_up
from jserve.types import Submit


async def fan_out(submit: Submit, client: EngineClient, cached: bool) -> list[Submit]:
    """The n sequences, each with an id and a seed of its own. With a prefix cache (`cached`), once
    a long prompt is in it. Raises what the request is refused with."""
    rids = part_ids(submit)
    if cached and reusable(submit) >= MIN_SHARED:
        submit, claims = claimed(client, submit)
        rid = f"{submit.rid}_warm_{uuid.uuid4().hex}"  # what aborts all sequences aborts it
        try:
            await warm_up(client, [prefix_of(submit, rid, len(submit.prompt_ids))], claims)
        except BaseException:  # cancelled, too
            forget(client, claims)
            raise
    seed, parts = submit.sampling.sampling_seed, []
    for i, rid in enumerate(rids):
        own = None if seed is None else (seed + i + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(submit.sampling, n=1, sampling_seed=own)
        parts.append(msgspec.structs.replace(submit, rid=rid, sampling=sampling))
    return parts
