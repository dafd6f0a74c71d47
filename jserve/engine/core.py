"""Requests in, outputs out: what every front calls.

    GenerateRequest → submission.py → Submit → … → Delta → sequence.py → Output

Text becomes ids and ids become text on this side. Which tokens run when is decided on the other,
and how to reach that is client.py's business; how both start and end is engine.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

from jserve.config import Config
from jserve.engine.client import EngineClient
from jserve.engine.fanout import fan_out
from jserve.engine.farewell import see_off
from jserve.engine.grammars import Grammars
from jserve.engine.refusals import raise_refusal
from jserve.engine.reporter import Reporter
from jserve.engine.sequence import Sequence
from jserve.engine.submission import make_submit
from jserve.metrics.meter import NO_METER, Meter
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Abort, GenerateRequest, Output, Submit


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCore:
    """A request's way through an engine that is ready; usable from any event loop and thread."""

    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    meter: Meter
    grammars: Grammars
    vocab_size: int
    context_length: int
    reporters: list[Reporter] = dataclasses.field(default_factory=list)

    async def generate_stream(
        self, request: GenerateRequest, submit: Submit | None = None
    ) -> AsyncGenerator[Output, None]:
        """Outputs of one request, its n sequences interleaved; a set `finish` is a sequence's last.

        With `stream` one comes every stream_interval tokens, without it only the last. Raises
        RequestError (before the first Output, but for a slow stop regex), QueueFullError,
        EngineDeadError. Closing the iterator aborts the request. `submit`: its own, if made before.
        """
        client, meter = self.client, self.meter if request.log_metrics else NO_METER
        client.require_alive()
        limits = (self.vocab_size, self.context_length)
        submit = submit or await make_submit(request, self.tokenizer, limits, self.grammars)
        parts = [submit]
        if request.sampling.n > 1:
            parts = await fan_out(submit, client, not self.config.cache.disable_radix_cache)
        with client.open(parts) as inbox:
            sequences = {
                part.rid: Sequence(i, part, self.tokenizer, meter, self.config.server)
                for i, part in enumerate(parts)
            }
            for reporter in self.reporters:
                reporter.received(request, submit)
            try:
                while sequences:
                    delta = await inbox.get()
                    sequence = sequences.get(delta.rid)
                    if sequence is None:
                        continue  # a token behind a stop string
                    output = sequence.push(delta)
                    if sequence.finish is not None:
                        del sequences[delta.rid]
                        client.close(delta.rid)
                        for reporter in self.reporters:
                            reporter.ended(request, delta.rid, output)
                        if sequence.stopped_early:
                            client.send(Abort(rid=delta.rid, stopped=True))
                        if sequence.finish.type == "abort":
                            raise_refusal(sequence.finish)
                    if output is not None:
                        yield output
            finally:
                if sequences:
                    see_off(client, inbox, sequences, request, self.reporters)
