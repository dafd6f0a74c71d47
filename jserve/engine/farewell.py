"""What becomes of sequences whose client has left: they are aborted, and counted with all that the
engine has still to say of them. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterable, Mapping

from jserve.engine.client import EngineClient
from jserve.engine.reporter import Reporter
from jserve.engine.sequence import Sequence
from jserve.types import Abort, Delta, FinishReason, GenerateRequest, Output

_LEFT = FinishReason(type="abort", message="Its client left.")
_LONGEST = 3600.0  # seconds for the engine to say it


def see_off(
    client: EngineClient,
    sequences: Mapping[str, Sequence],
    requests: Mapping[str, GenerateRequest],
    reporters: Iterable[Reporter],
) -> None:
    """Abort `sequences`, by their ids, which are free again: all but those that have ended unread,
    which are told as what they were. The rest of the others' Deltas is noted. `requests`: whose
    they are, by the same ids."""
    going = {rid: sequence for rid, sequence in sequences.items() if sequence.finish is None}
    _Leaving(client, dict(going)).leave()
    unread = {rid: _last(one) for rid, one in sequences.items() if rid not in going}
    for reporter in reporters:
        for rid in sequences:
            reporter.ended(requests[rid], rid, unread.get(rid))


def _last(sequence: Sequence) -> Output | None:
    """None of one that was aborted, or that failed here: its last would be an error."""
    finish = sequence.finish
    return None if finish is None or finish.type == "abort" else sequence.output()


class _Leaving:
    """Sequences until the last Delta of each, or the end of the event loop; then what is known must
    do. No task waits for that: one that begins while its loop is ended would be left behind."""

    def __init__(self, client: EngineClient, sequences: dict[str, Sequence]) -> None:
        self._client, self._sequences = client, sequences
        self._keys: list[tuple[str, int]] = []

    def leave(self) -> None:
        for rid in list(self._sequences):
            if not self._abort(rid):
                _count(rid, self._sequences.pop(rid))
        if self._sequences:
            # the loop alone holds the timer: who closes it drops that
            timer = asyncio.get_running_loop().call_later(_LONGEST, self._give_up)
            self._timer, self._end = weakref.ref(timer), weakref.finalize(timer, self._give_up)
            self._end.atexit = False

    def _abort(self, rid: str) -> bool:
        """Whether more is heard of it: its route is open until it is out of `client.left`."""
        route = self._client.routes.get(rid)
        if route is None:  # the event loop was closed under it, and the engine has spoken since
            return False
        heard = not route.loop.is_closed()
        self._client.close(rid)
        if heard:
            self._keys.append((rid, route.turn))
            self._client.left[rid, route.turn], route.take = route, self._take
        self._client.send(Abort(rid=rid))
        return heard

    def _take(self, delta: Delta) -> None:
        sequence = self._sequences.get(delta.rid)
        if sequence is None:
            return  # it had ended when the engine did
        sequence.note(delta)
        if sequence.finish is not None:
            del self._sequences[delta.rid]
        if not self._sequences:
            self._over()

    def _give_up(self) -> None:
        for rid, sequence in self._sequences.items():
            _count(rid, sequence)
        self._sequences.clear()
        self._over()

    def _over(self) -> None:
        for key in self._keys:
            self._client.left.pop(key, None)
        self._end.detach()
        if (timer := self._timer()) is not None:
            timer.cancel()


def _count(rid: str, sequence: Sequence) -> None:
    sequence.note(Delta(rid=rid, token_ids=[], finish=_LEFT, ended=time.time()))
