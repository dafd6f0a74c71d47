"""Requests in, outputs out: what every front calls.

    GenerateRequest → submission.py → Submit → … → Delta → sequence.py → Output

Text becomes ids and ids become text on this side. Which tokens run when is decided on the other,
and how to reach that is client.py's business; how both start and end is engine.py's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractContextManager, aclosing

from jserve.config import Config
from jserve.engine.client import EngineClient
from jserve.engine.fanout import fan_out, sequence_ids
from jserve.engine.farewell import see_off
from jserve.engine.grammars import Grammars
from jserve.engine.ranges import check_ranges
from jserve.engine.refusals import raise_refusal
from jserve.engine.reporter import Reporter
from jserve.engine.route import Route
from jserve.engine.sequence import Sequence
from jserve.engine.submission import make_submit
from jserve.metrics.meter import NO_METER, Meter
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Abort, Delta, GenerateRequest, Output, Submit

#: A request, what the engine gets of it but for n, and its n sequences.
Asked = tuple[GenerateRequest, Submit, list[Submit]]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCore:
    """A request's way through an engine that is ready; usable from any event loop and thread."""

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    meter: Meter
    grammars: Grammars
    limits: tuple[int, int]  # size of the vocabulary, context length
    reporters: list[Reporter] = dataclasses.field(default_factory=list)

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """Outputs of one request, its n sequences interleaved; a set `finish` is a sequence's last.

        With `stream` one is due every stream_interval tokens, without it only the last; what comes
        until it is read is part of it. Raises RequestError (before the first Output, but for a slow
        stop regex), QueueFullError, EngineDeadError. Closing the iterator aborts the request.
        """
        rid = request.rid or uuid.uuid4().hex
        with self.claim(request, rid) as claims:
            submit = await self.submit(request, rid, claims)
            parts = [submit]
            if request.sampling.n > 1:
                parts = await fan_out(submit, claims, self.client, self.config.cache)
            async with aclosing(self.outputs([(request, submit, parts)])) as outputs:
                async for output in outputs:
                    yield output

    def claim(self, request: GenerateRequest, rid: str) -> AbstractContextManager[list[Route]]:
        """EngineClient.claim of its sequences, which comes before all that takes a time."""
        self.client.require_alive()
        check_ranges(request.sampling, self.limits[0])
        n = request.sampling.n
        return self.client.claim([rid] if n == 1 else sequence_ids(rid, n))

    async def submit(self, request: GenerateRequest, rid: str, claims: list[Route]) -> Submit:
        """What the engine gets of it, but for n. Raises RequestError."""
        params = request.sampling
        submit = await make_submit(request, rid, self.tokenizer, self.limits)
        constrained = params.json_schema or params.regex or params.ebnf or params.structural_tag
        if constrained or request.require_reasoning:
            return await self.grammars.compiled(submit, claims, request.require_reasoning)
        return submit

    async def outputs(self, asked: Collection[Asked]) -> AsyncGenerator[Output, None]:
        """Send what is claimed; its Outputs, `index` counting all sequences. Deltas are taken in as
        they come, also while nobody reads."""
        client, due = self.client, asyncio.Queue[Sequence]()
        requests: dict[str, GenerateRequest] = {}
        sequences: dict[str, Sequence] = {}  # not read to their ends

        def take(delta: Delta) -> None:
            sequence = sequences[delta.rid]
            if sequence.push(delta):
                due.put_nowait(sequence)
            if sequence.finish is not None:
                client.close(delta.rid)
                if sequence.stopped_early:
                    client.send(Abort(rid=delta.rid, stopped=True))

        for request, _, parts in asked:
            meter = self.meter if request.log_metrics else NO_METER
            for part in parts:
                i, options, requests[part.rid] = len(sequences), self.config.server, request
                sequences[part.rid] = Sequence(i, part, self.tokenizer, meter, options)
        client.submit([part for _, _, parts in asked for part in parts], take)
        try:
            for reporter in self.reporters:
                for request, submit, _ in asked:
                    reporter.received(request, submit)
            while sequences:
                output = (await due.get()).output()
                if output.finish is not None:
                    del sequences[output.rid]
                    for reporter in self.reporters:
                        reporter.ended(requests[output.rid], output.rid, output)
                    if output.finish.type == "abort":
                        raise_refusal(output.finish)
                yield output
        finally:
            if sequences:
                see_off(client, sequences, requests, self.reporters)
