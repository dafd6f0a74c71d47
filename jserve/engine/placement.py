"""Which data-parallel rank serves a request: the one that has its beginning cached, or else the
one with the least to do.

Knows token ids and ranks; nothing of processes and devices, nor of the caches themselves: what a
rank has cached is guessed from what it was sent. A wrong guess costs time, never an answer.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math
import threading
from collections.abc import Sequence, Set

from jserve.errors import EngineDeadError, RequestError
from jserve.types import Submit

_MIN_BLOCK = 16  # tokens; smaller pages are hashed several at a time
_MIN_SHARE = 0.3  # of a prompt: with less of it cached, load alone decides
# A request weighs its prompt tokens that are not cached, and this for its decoding.
_REQUEST_WEIGHT = 512
# The rank with the cached prefix may have more to do than the idlest one by either of these.
_MAX_EXCESS = 16 * _REQUEST_WEIGHT
_MAX_RATIO = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank has open: requests, and tokens as they weigh here. `alive`: it was not lost."""

    rank: int
    num_requests: int
    num_tokens: int
    alive: bool


class Placement:
    """Safe from any thread.

    A prompt is known by the chained hashes of its whole blocks, in its cache namespace; each rank
    remembers the last `num_blocks` of them that it was sent. `slots`, which may be told later, is
    how many requests a rank runs at a time: nobody waits for one beside a free one. Ranks that
    are `deaf`, which may be told too, get what names them, and the rest only if all are.
    """

    def __init__(self, ranks: int, page_size: int = 16, *, num_blocks: int = 1 << 16) -> None:
        self._block_size = page_size * -(-_MIN_BLOCK // page_size)
        self._ranks = [_Rank(rank, num_blocks) for rank in range(ranks)]
        self._open: dict[str, dict[int, _Open]] = {}  # by rid, then turn: the latest comes last
        self._lock = threading.Lock()
        self._first = 0  # of ranks that are alike
        self.slots: float = math.inf
        self.deaf: Set[int] = frozenset()

    def place(self, submit: Submit) -> int:
        """The rank for `submit`, which is its load until `end`.

        Raises RequestError for a `routed_dp_rank` that there never was, EngineDeadError for one
        that is lost, or when all are.
        """
        blocks = self._blocks_of(submit)
        with self._lock:
            living = [rank for rank in self._ranks if rank.alive]
            if not living:
                raise EngineDeadError("every data-parallel rank has ended")
            if submit.routed_dp_rank is None:
                heard = [rank for rank in living if rank.index not in self.deaf]
                rank = self._choose(heard or living, blocks)
            else:
                rank = self._named(submit.routed_dp_rank)
            cached = self._block_size * rank.num_cached(blocks)
            weight = len(submit.prompt_ids) - cached + _REQUEST_WEIGHT
            rank.remember(blocks)
            self._end(submit.rid, submit.turn)  # a caller that sends one twice counts it once
            self._open.setdefault(submit.rid, {})[submit.turn] = _Open(rank.index, weight)
            rank.num_requests += 1
            rank.num_tokens += weight
            return rank.index

    def rank_of(self, rid: str) -> int | None:
        """Where the latest request with this id was placed, while it is open."""
        with self._lock:
            turns = self._open.get(rid)
            return None if turns is None else turns[next(reversed(turns))].rank

    def end(self, rid: str, turn: int | None = None) -> None:
        """The request is over: finished, refused, or aborted by an Abort that awaits no Delta.

        `turn` is its Submit's, since an id may be used again before the last Delta has come; None
        means the latest. Of what is not open, nothing happens.
        """
        with self._lock:
            if turn is None:
                turn = next(reversed(self._open.get(rid, {})), 0)
            self._end(rid, turn)

    def lose(self, rank: int) -> list[tuple[str, int]]:
        """The rank broke: it is never chosen again. → the (rid, turn) of what it had open."""
        with self._lock:
            self._ranks[rank].alive = False
            self._ranks[rank].forget()
            lost = [
                (rid, turn)
                for rid, turns in self._open.items()
                for turn, one in turns.items()
                if one.rank == rank
            ]
            for rid, turn in lost:
                self._end(rid, turn)
            return lost

    def forget(self) -> None:
        """The caches of all ranks were flushed."""
        with self._lock:
            for rank in self._ranks:
                rank.forget()

    def loads(self) -> list[RankLoad]:
        with self._lock:
            return [
                RankLoad(rank.index, rank.num_requests, rank.num_tokens, rank.alive)
                for rank in self._ranks
            ]

    def _blocks_of(self, submit: Submit) -> list[int]:
        """A hash for each whole block of the prompt, of all up to its end."""
        size, ids = self._block_size, array.array("i", submit.prompt_ids).tobytes()
        width = size * array.array("i").itemsize
        known = hash((submit.extra_key, submit.cache_salt))
        blocks = []
        for end in range(width, len(ids) + 1, width):
            known = hash((known, ids[end - width : end]))
            blocks.append(known)
        return blocks

    def _named(self, rank: int) -> _Rank:
        if not 0 <= rank < len(self._ranks):
            raise RequestError(
                f"routed_dp_rank must be in [0, {len(self._ranks) - 1}], got {rank}.",
                "routed_dp_rank",
            )
        if not self._ranks[rank].alive:
            living = ", ".join(str(one.index) for one in self._ranks if one.alive)
            raise EngineDeadError(f"routed_dp_rank {rank} has ended; {living} can be chosen.")
        return self._ranks[rank]

    def _choose(self, living: Sequence[_Rank], blocks: list[int]) -> _Rank:
        cached = {rank.index: rank.num_cached(blocks) for rank in living}
        most, least = max(cached.values()), self._idlest(living)
        if most and most >= _MIN_SHARE * len(blocks):
            best = self._idlest([rank for rank in living if cached[rank.index] == most])
            excess = best.num_tokens - least.num_tokens
            near = excess <= _MAX_EXCESS or best.num_tokens <= _MAX_RATIO * least.num_tokens
            if near and not least.num_requests < self.slots <= best.num_requests:
                return best
        self._first = least.index + 1
        return least

    def _idlest(self, ranks: Sequence[_Rank]) -> _Rank:
        count = len(self._ranks)
        return min(ranks, key=lambda one: (one.num_tokens, (one.index - self._first) % count))

    def _end(self, rid: str, turn: int) -> None:
        turns = self._open.get(rid)
        one = None if turns is None else turns.pop(turn, None)
        if turns is None or one is None:
            return
        if not turns:
            del self._open[rid]
        self._ranks[one.rank].num_requests -= 1
        self._ranks[one.rank].num_tokens -= one.weight


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    rank: int
    weight: int


class _Rank:
    """One rank as it looks from here."""

    def __init__(self, index: int, num_blocks: int) -> None:
        self.index, self.alive = index, True
        self.num_requests = self.num_tokens = 0
        self._most = num_blocks
        self._blocks: collections.OrderedDict[int, None] = collections.OrderedDict()

    def num_cached(self, blocks: list[int]) -> int:
        """How many blocks from the beginning it was sent."""
        return next((i for i, one in enumerate(blocks) if one not in self._blocks), len(blocks))

    def remember(self, blocks: list[int]) -> None:
        """From the last to the first, so that the ends of prompts are forgotten before what they
        share."""
        for one in reversed(blocks):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        self._blocks.clear()
