"""The ids of requests that are accepted and not yet sent: nobody else's, and aborts of them noted.

Who claims ids owns them until EngineClient.open gets their Submits, whose routes they are from then
on; of those that it never gets, the owner must `forget` the claims, however it ends. Whoever is
handed a Submit that is `claimed` is the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jserve.engine.client import EngineClient
from jserve.errors import RequestError
from jserve.types import Abort, Submit

#: By id, the aborts of it that came since. The list itself says whose claim it is.
Claims = Mapping[str, list[Abort]]


def claim(client: EngineClient, rids: Sequence[str]) -> Claims:
    """From here on `rids` are in use. Raises RequestError for one that is."""
    for rid in rids:
        if client.route_of(rid) is not None or rid in client.aborted_early:
            raise RequestError(f"rid {rid} is in use by an open request.", "rid")
    claims: dict[str, list[Abort]] = {rid: [] for rid in rids}
    client.aborted_early.update(claims)
    return claims


def claimed(client: EngineClient, submit: Submit) -> tuple[Submit, Claims]:
    """The request as the owner of its ids: only then may it wait for anything. Raises like `claim`,
    unless it is that already."""
    rids = part_ids(submit)
    if submit.claimed:
        return submit, {rid: client.aborted_early[rid] for rid in rids}
    claims = claim(client, rids)
    return msgspec.structs.replace(submit, claimed=True), claims


def all_aborted(claims: Claims) -> bool:
    return all(claims.values())


def forget(client: EngineClient, claims: Claims) -> None:
    """These will not start. Ids that were sent meanwhile, and may be another's since, are left."""
    for rid, aborts in claims.items():
        if client.aborted_early.get(rid) is aborts:
            del client.aborted_early[rid]


def part_ids(submit: Submit) -> list[str]:
    """The ids of a request's sequences."""
    n = submit.sampling.n
    return [submit.rid] if n == 1 else [f"{submit.rid}_{i}" for i in range(n)]
