"""One sequence in the API process: Deltas in as they come, Outputs out when somebody reads.

Owns text, stop strings, cumulative ids and log-probabilities, and the latencies of a sequence.
It sends nothing: core.py asks `stopped_early` and tells the engine.
"""

from __future__ import annotations

import io
import time

from jserve.config import ServerOptions
from jserve.metrics.meter import Meter
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Delta, FinishReason, Output, Submit, Times, Transcript


class Sequence:
    """Accumulates one Submit's Deltas. Without its `stream` only the last Output becomes due."""

    def __init__(
        self, index: int, submit: Submit, tokenizer: Tokenizer, meter: Meter, options: ServerOptions
    ) -> None:
        self.finish: FinishReason | None = None
        self.stopped_early = False  # it is over here while the engine still generates
        self._error: Exception | None = None
        self._index, self._submit, self._meter = index, submit, meter
        self._detokenizer = Detokenizer(tokenizer, submit.sampling)
        # tokens between two Outputs; the first and the last are never held back
        self._interval = submit.sampling.stream_interval or options.stream_interval
        self._said = Transcript(ids=[], text=io.StringIO())
        self._due = False
        self._num_sent = 0  # of the ids
        self._pending: list[str] = []  # text since the last Output
        self._latest = Delta(rid=submit.rid, token_ids=[])
        self._times = Times(created=submit.created, sent=submit.sent, shown=options.enable_metrics)

    def push(self, delta: Delta) -> bool:
        """Take a Delta in; whether an Output became due by it. After a finish there are no more.

        What fails ends the sequence, and is raised by `output`.
        """
        started, said, self._latest = time.time(), self._said, delta
        said.ids += delta.token_ids
        if self._submit.logprobs is not None:
            said.score(delta)
        try:
            self.finish = self._decode(delta)
        except Exception as error:  # whatever it is, it is this sequence's: `output` raises it
            self._error, self.finish = error, FinishReason(type="abort", message=str(error))
        self.stopped_early = self.finish is not None and delta.finish is None
        self._meter.timing.observe("output_detokenize_seconds", time.time() - started)
        self._observe(delta, started)
        num_new, waits = len(said.ids) - self._num_sent, self._due
        enough = self._num_sent == 0 or num_new >= self._interval
        self._due = self.finish is not None or bool(self._submit.stream and num_new and enough)
        return self._due and not waits

    def note(self, delta: Delta) -> None:
        """Count a Delta whose text nobody will read: the client has left."""
        self._said.ids += delta.token_ids
        self.finish = delta.finish
        self._observe(delta, time.time())

    def output(self) -> Output:
        """All that came since the last one. Raises what `push` failed with."""
        if self._error is not None:
            raise self._error
        said, latest = self._said, self._latest
        output = Output(
            index=self._index,
            rid=self._submit.rid,
            transcript=said,
            text_len=said.text.tell(),
            delta="".join(self._pending),
            new_ids=said.ids[self._num_sent :],
            finish=self.finish,
            prompt_tokens=latest.prompt_tokens,
            completion_tokens=len(said.ids),
            cached_tokens=latest.cached_tokens,
            num_retractions=latest.num_retractions,
            times=self._times,
            prompt_ids=self._submit.prompt_ids,
        )
        self._pending, self._num_sent, self._due = [], len(said.ids), False
        return output

    def _decode(self, delta: Delta) -> FinishReason | None:
        """Text of the new tokens; a stop string beats whatever reason the engine had."""
        finish, detokenizer, said = delta.finish, self._detokenizer, self._said
        text = detokenizer.push(delta.token_ids)
        if finish is not None and detokenizer.stopped is None:
            by_token = finish.type == "stop" and not isinstance(finish.matched, str)
            text += detokenizer.finish(by_token)
        self._pending.append(text)
        said.text.write(text)
        if detokenizer.stopped is None:
            return finish
        said.cut(detokenizer.num_tokens_used)
        return FinishReason(type="stop", matched=detokenizer.stopped)

    def _observe(self, delta: Delta, started: float) -> None:
        now, times, submit = time.time(), self._times, self._submit
        if delta.token_ids and not times.first_token:
            # a sequence that does not stream has one Delta, long after its first token
            times.first_token = now if submit.stream else delta.prefill_finished or now
            times.queued, times.prefill_finished = delta.queue_time, delta.prefill_finished
            self._meter.first_token(submit, times)
        elif delta.token_ids:
            self._meter.tokens(submit, len(delta.token_ids), now - times.latest)
        times.latest, times.cache, times.num_steps = now, delta.cache_seconds, delta.num_steps
        if self.finish is not None:
            times.ended, times.dp_rank = delta.ended or started, delta.dp_rank  # or a stop string
            self._meter.finished(submit, self.finish, delta, len(self._said.ids), times)
