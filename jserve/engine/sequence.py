"""One sequence in the API process: Deltas in, Outputs out.

Owns text, stop strings, cumulative ids and log-probabilities, and the latencies of a sequence.
It sends nothing: core.py asks `stopped_early` and tells the engine.
"""

from __future__ import annotations

import time

from jserve.config import ServerOptions
from jserve.metrics.meter import Meter
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Delta, FinishReason, Output, Submit, Times, TokenLogprobs


class Sequence:
    """Accumulates one Submit's Deltas. Without its `stream` only the last Output is built."""

    def __init__(
        self, index: int, submit: Submit, tokenizer: Tokenizer, meter: Meter, options: ServerOptions
    ) -> None:
        self.finish: FinishReason | None = None
        self.stopped_early = False  # a stop string was hit while the engine still generates
        self._index, self._submit, self._meter = index, submit, meter
        self._detokenizer = Detokenizer(tokenizer, submit.sampling)
        # tokens between two Outputs; the first and the last are never held back
        self._interval = submit.sampling.stream_interval or options.stream_interval
        self._output_ids: list[int] = []
        self._num_sent = 0  # of _output_ids
        self._pending = ""  # text since the last Output
        self._logprobs: TokenLogprobs | None = None
        self._input_logprobs: TokenLogprobs | None = None
        self._times = Times(created=submit.created, sent=submit.sent, shown=options.enable_metrics)

    def push(self, delta: Delta) -> Output | None:
        """Take a Delta in; the Output that is due, if one is. After a finish there are no more."""
        started = time.time()
        self._output_ids += delta.token_ids
        self._input_logprobs = delta.input_logprobs or self._input_logprobs
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or TokenLogprobs(token_ids=[], values=[])
            self._logprobs.extend(delta.logprobs)
        self.finish = self._decode(delta)
        self._meter.timing.observe("output_detokenize_seconds", time.time() - started)
        self._observe(delta, started)
        num_new = len(self._output_ids) - self._num_sent
        due = self._num_sent == 0 or num_new >= self._interval
        if self.finish is None and not (self._submit.stream and num_new and due):
            return None
        return self._output(delta)

    def note(self, delta: Delta) -> None:
        """Count a Delta whose text nobody will read: the client has left."""
        self._output_ids, self.finish = self._output_ids + delta.token_ids, delta.finish
        self._observe(delta, time.time())

    def _decode(self, delta: Delta) -> FinishReason | None:
        """Text of the new tokens; a stop string beats whatever reason the engine had."""
        finish, detokenizer = delta.finish, self._detokenizer
        self._pending += detokenizer.push(delta.token_ids)
        if finish is not None and detokenizer.stopped is None:
            by_token = finish.type == "stop" and not isinstance(finish.matched, str)
            self._pending += detokenizer.finish(by_token)
        if detokenizer.stopped is None:
            return finish
        self.stopped_early = finish is None
        del self._output_ids[detokenizer.num_tokens_used :]
        if self._logprobs is not None:
            self._logprobs.cut(detokenizer.num_tokens_used)
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
            self._meter.finished(submit, self.finish, delta, len(self._output_ids), times)

    def _output(self, delta: Delta) -> Output:
        output = Output(
            index=self._index,
            rid=self._submit.rid,
            text=self._detokenizer.text,
            delta=self._pending,
            output_ids=self._output_ids.copy(),
            new_ids=self._output_ids[self._num_sent :],
            finish=self.finish,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=len(self._output_ids),
            cached_tokens=delta.cached_tokens,
            num_retractions=delta.num_retractions,
            times=self._times,
            output_logprobs=self._logprobs,
            input_logprobs=self._input_logprobs,
            prompt_ids=self._submit.prompt_ids,
        )
        self._pending, self._num_sent = "", len(self._output_ids)
        return output
