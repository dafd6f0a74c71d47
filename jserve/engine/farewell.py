"""What becomes of sequences whose client has left: they are aborted, and counted with all that the
engine has still to say of them. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from jserve.engine.client import EngineClient, Inbox
from jserve.engine.reporter import Reporter
from jserve.engine.sequence import Sequence
from jserve.types import Abort, Delta, FinishReason, GenerateRequest

_LEFT = FinishReason(type="abort", message="Its client left.")


def see_off(
    client: EngineClient,
    inbox: Inbox,
    sequences: Mapping[str, Sequence],
    request: GenerateRequest,
    reporters: Iterable[Reporter],
) -> None:
    """Abort `sequences` of `request`, by their ids, which are free again; their Deltas still come
    in `inbox`."""
    keys = [key for rid in sequences if (key := _leave(client, rid)) is not None]

    def over(task: asyncio.Task[None]) -> None:
        for key in keys:
            client.left.pop(key, None)

    if keys:
        task = asyncio.get_running_loop().create_task(_listen(inbox, dict(sequences)))
        task.add_done_callback(over)
    else:  # the event loop was closed under them
        _count(sequences)
    for reporter in reporters:
        for rid in sequences:
            reporter.ended(request, rid, None)


def _leave(client: EngineClient, rid: str) -> tuple[str, int] | None:
    """→ the key of its route, which is open until it is out of `client.left`."""
    if (route := client.route_of(rid)) is None:
        return None
    client.left[rid, route[2]] = route
    client.close(rid)
    client.send(Abort(rid=rid))
    return rid, route[2]


async def _listen(inbox: Inbox, sequences: dict[str, Sequence]) -> None:
    """Until the last Delta of each, or the end of the event loop; then what is known must do."""
    try:
        while sequences:
            delta = await inbox.get()
            sequence = sequences.get(delta.rid)
            if sequence is None:
                continue  # a token behind a stop string
            sequence.note(delta)
            if sequence.finish is not None:
                del sequences[delta.rid]
    finally:
        _count(sequences)


def _count(sequences: Mapping[str, Sequence]) -> None:
    for rid, sequence in sequences.items():
        sequence.note(Delta(rid=rid, token_ids=[], finish=_LEFT, ended=time.time()))
