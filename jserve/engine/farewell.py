"""What becomes of sequences whose client has left: they are aborted, and counted with all that the
engine has still to say of them. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from jserve.engine.client import EngineClient
from jserve.engine.reporter import Reporter
from jserve.engine.sequence import Sequence
from jserve.types import Abort, Delta, FinishReason, GenerateRequest

_LEFT = FinishReason(type="abort", message="Its client left.")


def see_off(
    client: EngineClient,
    sequences: Mapping[str, Sequence],
    requests: Mapping[str, GenerateRequest],
    reporters: Iterable[Reporter],
) -> None:
    """Abort `sequences`, by their ids, which are free again: all but those that have ended unread.
    The rest of their Deltas is noted. `requests`: whose they are, by the same ids."""
    inbox = asyncio.Queue[Delta]()
    going = {rid: sequence for rid, sequence in sequences.items() if sequence.finish is None}
    keys = [key for rid in going if (key := _leave(client, rid, inbox.put_nowait)) is not None]

    def over(task: asyncio.Task[None]) -> None:
        for key in keys:
            client.left.pop(key, None)

    if keys:
        task = asyncio.get_running_loop().create_task(_listen(inbox, going))
        task.add_done_callback(over)
    else:  # the event loop was closed under them
        _count(going)
    for reporter in reporters:
        for rid in sequences:
            reporter.ended(requests[rid], rid, None)


def _leave(client: EngineClient, rid: str, take: Callable[[Delta], None]) -> tuple[str, int] | None:
    """→ the key of its route, which is open until it is out of `client.left`."""
    if (route := client.routes.get(rid)) is None:
        return None
    client.left[rid, route.turn] = route
    client.close(rid)
    route.take = take
    client.send(Abort(rid=rid))
    return rid, route.turn


async def _listen(inbox: asyncio.Queue[Delta], sequences: dict[str, Sequence]) -> None:
    """Until the last Delta of each, or the end of the event loop; then what is known must do."""
    try:
        while sequences:
            delta = await inbox.get()
            sequence = sequences.get(delta.rid)
            if sequence is None:
                continue  # it had ended when the engine did
            sequence.note(delta)
            if sequence.finish is not None:
                del sequences[delta.rid]
    finally:
        _count(sequences)


def _count(sequences: Mapping[str, Sequence]) -> None:
    for rid, sequence in sequences.items():
        sequence.note(Delta(rid=rid, token_ids=[], finish=_LEFT, ended=time.time()))
