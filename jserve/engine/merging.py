"""What several data-parallel ranks say, as one engine would: numbers, facts, replies, progress.

Knows what the numbers' names mean, and nothing of where the messages come from or go to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jserve.types import ControlReply, Gauges, Progress

#: Shares and rates of ranks that are alike; the engine's is the mean of those that tell. Families
#: of labelled ones too.
_MEANS = (
    "expert_balancedness",
    *("cache_hit_rate", "new_token_ratio", "token_usage", "full_token_usage", "swa_token_usage"),
    "utilization",
)
#: What each rank has alike. Everything else adds up.
_SAME = ("page_size", "context_len")
#: Facts that are tables of numbers, of which each adds up.
_TABLES = ("expert_tokens",)
#: Facts that add up; the others are the first rank's, and so are all in `internal_states`.
_SUMMED_FACTS = (
    *("max_total_num_tokens", "max_total_num_tokens_swa", "max_running_requests", "weight_bytes"),
)


def merged_values(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    merged = _sums(ranks)
    for name in merged:
        if name.partition("/")[0] in _MEANS:
            merged[name] /= sum(name in one for one in ranks)
    return merged | {name: ranks[0][name] for name in _SAME if name in merged}


def merged_gauges(ranks: Mapping[int, Gauges]) -> Gauges:
    """Of the ranks that live, with those of each; beside them how many that are."""
    series = dict.fromkeys(name for one in ranks.values() for name in one.histograms)
    histograms = {
        name: [sum(column, 0.0) for column in zip(*_those_with(name, ranks.values()), strict=True)]
        for name in series
    }
    values = merged_values([one.values for one in ranks.values() if one.values])
    return Gauges(
        values=values | {"num_dp_ranks": float(len(ranks))},
        histograms=histograms,
        step=sum(one.step for one in ranks.values()),
        time=max((one.time for one in ranks.values()), default=0.0),
        ranks=dict(ranks),
    )


def merged_facts(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a server says of itself when all ranks are ready; `ranks` holds what each said."""
    sums = _sums([{name: one[name] for name in _SUMMED_FACTS if name in one} for one in ranks])
    tables = {
        name: _table([one[name] for one in ranks if name in one])
        for name in _TABLES
        if any(name in one for one in ranks)
    }
    return {**ranks[0], **sums, **tables, "ranks": [dict(one) for one in ranks]}


@dataclasses.dataclass(slots=True)
class _Question:
    awaited: set[int]
    deaf: set[int]  # not waited for, or not any more
    due: float  # of time.monotonic
    replies: dict[int, ControlReply] = dataclasses.field(default_factory=dict)


class JointReplies:
    """Controls that were put to several ranks, until the last of them has replied, is lost, or has
    not answered for `patience` seconds.

    `facts`: names of what is not summed up in a payload, beyond what merged_facts does. `deaf`:
    ranks that did not answer and were not heard since; nobody waits for them, unless all are.
    """

    def __init__(self, patience: float) -> None:
        self.facts: Collection[str] = ()
        self.deaf: set[int] = set()
        self._patience = patience
        self._open: dict[str, _Question] = {}

    def expect(self, id: str, ranks: Collection[int]) -> None:
        awaited = set(ranks) - self.deaf or set(ranks)
        due = time.monotonic() + self._patience
        self._open[id] = _Question(awaited, set(ranks) - awaited, due)

    def take(self, rank: int, reply: ControlReply) -> ControlReply | None:
        """The joint reply, if this was the last."""
        if reply.id not in self._open:
            return None
        question = self._open[reply.id]
        question.replies[rank] = reply
        question.deaf.discard(rank)
        return self._without(rank, reply.id)

    def lose(self, rank: int) -> list[ControlReply]:
        """The joint replies that waited for this rank only."""
        self.deaf.discard(rank)
        for question in self._open.values():
            question.deaf.discard(rank)
        return self._without_all({rank}, list(self._open))

    def expire(self) -> list[ControlReply]:
        """The joint replies that have waited for long enough; who kept them waiting is `deaf`."""
        now = time.monotonic()
        late = [id for id, question in self._open.items() if question.due <= now]
        deaf = {rank for id in late for rank in self._open[id].awaited}
        self.deaf |= deaf
        for question in self._open.values():
            question.deaf |= question.awaited & deaf
        return self._without_all(deaf, list(self._open))

    def _without_all(self, ranks: set[int], ids: Iterable[str]) -> list[ControlReply]:
        joint = [self._without(rank, id) for id in ids for rank in self._open[id].awaited & ranks]
        return [reply for reply in joint if reply is not None]

    def _without(self, rank: int, id: str) -> ControlReply | None:
        question = self._open[id]
        question.awaited.discard(rank)
        if question.awaited:
            return None
        del self._open[id]
        replies, deaf = question.replies, sorted(question.deaf)
        wrong = next((reply for reply in replies.values() if not reply.ok), None)
        if wrong is not None or not (replies or deaf):
            return ControlReply(id=id, ok=False, message=wrong.message if wrong else "")
        payloads = {rank: reply.payload for rank, reply in sorted(replies.items())}
        if any(payloads.values()):
            return ControlReply(id=id, ok=True, payload=self._info(payloads, deaf), deaf=deaf)
        return ControlReply(id=id, ok=not deaf, message=self._silence(deaf), deaf=deaf)

    def _silence(self, deaf: Sequence[int]) -> str:
        if not deaf:
            return ""
        ranks = ", ".join(map(str, deaf))
        return f"no answer of data-parallel rank {ranks} within {self._patience:g} s"

    def _info(self, payloads: Mapping[int, Mapping[str, Any]], deaf: list[int]) -> dict[str, Any]:
        """Facts and numbers of all together, and in `internal_states` those of each."""
        ranks = list(payloads.values())
        merged = merged_facts(ranks)
        del merged["ranks"]
        truths = [name for name, value in ranks[0].items() if type(value) is bool]
        known = {*truths, *self.facts}
        merged |= merged_values([{k: v for k, v in r.items() if k not in known} for r in ranks])
        merged |= {name: any(r[name] for r in ranks) for name in truths}  # `paused` is one
        states = [{"dp_rank": rank, **payload} for rank, payload in payloads.items()]
        return {**merged, "internal_states": states, "deaf_dp_ranks": deaf}


class JointProgress:
    """A start-up that is as far as the rank that is least far."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._done: dict[str, dict[int, Progress]] = {}  # by stage, in their order
        self._facts: dict[int, dict[str, Any]] = {}

    @property
    def ready(self) -> bool:
        return len(self._facts) == self._num_ranks

    def take(self, rank: int, message: Progress) -> Progress | None:
        """What there is to tell now, if anything; once all are ready, that, with the facts."""
        if message.stage == "ready":
            self._facts[rank] = message.payload
            facts = [self._facts[i] for i in sorted(self._facts)]
            return Progress(stage="ready", payload=merged_facts(facts)) if self.ready else None
        self._done.setdefault(message.stage, {})[rank] = message
        stages = list(self._done)
        behind = {stage for stage in stages if len(self._done[stage]) < self._num_ranks}
        earlier = stages[: stages.index(message.stage)]
        if any(stage in behind or not self._complete(stage) for stage in earlier):
            return None  # some rank is not yet in this stage
        ranks = self._done[message.stage].values()
        done, total = sum(one.done for one in ranks), sum(one.total for one in ranks)
        return Progress(stage=message.stage, done=done, total=total)

    def _complete(self, stage: str) -> bool:
        return all(one.done == one.total for one in self._done[stage].values())


def _sums(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in ranks:
        for name, value in one.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _table(tables: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The sum of each cell."""
    alike = [zip(*rows, strict=True) for rows in zip(*tables, strict=True)]
    return [[sum(cell) for cell in cells] for cells in alike]


def _those_with(name: str, ranks: Iterable[Gauges]) -> list[list[float]]:
    return [one.histograms[name] for one in ranks if name in one.histograms]
