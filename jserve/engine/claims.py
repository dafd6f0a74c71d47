"""The ids of requests that are accepted and not yet sent: nobody else's, and aborts of them noted.

Once they are sent, ids are EngineClient's routes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jserve.engine.client import EngineClient
from jserve.errors import RequestError
from jserve.types import Submit


def claim(client: EngineClient, rids: Sequence[str]) -> None:
    """From here on `rids` are in use, until EngineClient.open gets Submits that are `claimed`, or
    they are forgotten. Raises RequestError for one that is."""
    for rid in rids:
        if client.route_of(rid) is not None or rid in client.aborted_early:
            raise RequestError(f"rid {rid} is in use by an open request.", "rid")
    client.aborted_early.update(dict.fromkeys(rids, False))


def claimed(client: EngineClient, submit: Submit) -> Submit:
    """The request as the owner of its ids: only then may it wait for anything. Raises like `claim`,
    unless it is that already."""
    if submit.claimed:
        return submit
    claim(client, part_ids(submit))
    return msgspec.structs.replace(submit, claimed=True)


def forget(client: EngineClient, rids: Sequence[str]) -> None:
    """These will not start."""
    for rid in rids:
        client.aborted_early.pop(rid, None)


def part_ids(submit: Submit) -> list[str]:
    """The ids of a request's sequences."""
    n = submit.sampling.n
    return [submit.rid] if n == 1 else [f"{submit.rid}_{i}" for i in range(n)]
