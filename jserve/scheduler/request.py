"""The scheduler's records: a Request from submit to its last Delta, and a Row, one stay of a
request in a slot.

A request that is retracted loses its Row and gets another one later; a launch in flight holds the
old Row, whose `alive` is then False, so that what it returns is dropped. Refuses to know: pages,
budgets, plans.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from jserve.cache.manager import Lease
from jserve.cache.radix import Namespace
from jserve.grammar.constraint import Constraint
from jserve.plan import SlotSampling
from jserve.scheduler.logprobs import Logprobs
from jserve.scheduler.refusal import misfit, unknown_ids
from jserve.scheduler.settings import SchedulerSettings
from jserve.types import TOP_K_ALL, Delta, FinishReason, Submit

#: A request's share of the reserve for tokens to come is clipped here.
MAX_RESERVED_TOKENS = 4096


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One sequence. Up to `logprobs` all is fixed at submit; the rest is what happens to it."""

    prompt: np.ndarray  # int32[·]
    submit: Submit
    limit: int  # output tokens after which it ends by length
    stop_ids: frozenset[int]  # end it, once min_new_tokens are there
    order: int  # arrival number
    arrived: float  # scheduler clock, seconds
    logprobs: Logprobs | None  # collects them, if any are wanted
    output_ids: list[int] = dataclasses.field(default_factory=list)
    row: Row | None = None  # None: waiting or over
    rank: int = 0  # the smallest goes first; 0 for all unless priorities order the queue
    since: float = 0.0  # scheduler clock: when it came to the queue, or to its slot
    ran: float = 0.0  # seconds before that, of a run that jumps (jump.py) have cut
    seed: int | None = None  # drawn at the first admission
    queue_time: float = 0.0
    cache_seconds: float = 0.0  # spent on matches and allocations when it was offered to admission
    since_chunk: float = 0.0  # scheduler clock: when its last chunk was committed, or it was seated
    num_chunks: int = 0  # committed
    cached_tokens: int = 0  # at the first admission
    num_retractions: int = 0
    num_forced: int = 0  # output tokens without a draw of their own: see jump.py
    num_resets: int = 0  # failed launches it was part of
    prefill_finished: float = 0.0
    num_sent: int = 0  # output tokens that Deltas have carried
    constraint: Constraint | None = None  # once a step has asked for its mask

    @property
    def rid(self) -> str:
        return self.submit.rid

    @property
    def streams(self) -> bool:
        """Whether a token must leave at once: for the client, or the search for stops in text."""
        sampling = self.submit.sampling
        return self.submit.stream or bool(sampling.stop or sampling.stop_regex)

    @property
    def namespace(self) -> Namespace:
        return self.submit.extra_key, self.submit.cache_salt

    @property
    def score_from(self) -> int | None:
        """First prompt token whose log-probability is still to be computed."""
        return None if self.logprobs is None else self.logprobs.score_from

    @property
    def max_match(self) -> int:
        """Tokens that may come from the cache: not the last one, nor what scores `score_from`."""
        most, first = len(self.prompt) + len(self.output_ids) - 1, self.score_from
        return most if first is None else min(most, max(first - 1, 0))

    @property
    def greedy(self) -> bool:
        return self.submit.sampling.temperature < 1e-6 or self.submit.sampling.top_k == 1

    @property
    def needs_full_sampler(self) -> bool:
        """Whether it needs more than argmax of its logits."""
        params = self.submit.sampling
        penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
        changed = bool(params.logit_bias) or params.min_new_tokens > 0
        return not self.greedy or penalties != (0.0, 0.0, 1.0) or changed

    @property
    def tokens_to_come(self) -> int:
        return min(self.limit - len(self.output_ids), MAX_RESERVED_TOKENS)

    def tokens(self) -> np.ndarray:
        """int32: the prompt and the output tokens."""
        prompt, outputs = self.prompt, self.output_ids
        return np.concatenate([prompt, np.array(outputs, np.int32)]) if outputs else prompt

    def slot_sampling(self, eos_token_ids: tuple[int, ...]) -> SlotSampling:
        """The sampling parameters as the device wants them; the seed has been drawn."""
        sampling, logprobs = self.submit.sampling, self.submit.logprobs
        assert self.seed is not None, self.rid
        return SlotSampling(
            seed=self.seed,
            temperature=0.0 if self.greedy else sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            top_k=TOP_K_ALL if sampling.top_k == -1 else sampling.top_k,
            min_new_tokens=sampling.min_new_tokens,
            stop_ids=tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids))),
            bias_ids=tuple(sampling.logit_bias),
            bias_values=tuple(sampling.logit_bias.values()),
            logprob_ids=logprobs.token_ids if logprobs is not None else (),
        )

    def delta(self, finish: FinishReason | None = None) -> Delta:
        """What it gained since its last Delta; marks it as sent."""
        new_ids, logprobs = self.output_ids[self.num_sent :], self.logprobs
        self.num_sent, undrawn = len(self.output_ids), self.num_retractions + self.num_forced
        return Delta(
            rid=self.submit.rid,
            turn=self.submit.turn,
            token_ids=new_ids,
            finish=finish,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.output_ids),
            num_retractions=self.num_retractions,
            logprobs=None if logprobs is None else logprobs.take(new_ids),
            input_logprobs=None if logprobs is None else logprobs.take_scores(),
            queue_time=self.queue_time,
            cache_seconds=self.cache_seconds,
            num_steps=self.num_chunks + max(len(self.output_ids) - 1 - undrawn, 0),
            prefill_finished=self.prefill_finished,
            ended=0.0 if finish is None else time.time(),
        )


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """One stay of a request in a slot: what a plan's `rows` hold."""

    request: Request
    slot: int
    lease: Lease
    tokens: np.ndarray  # int32: what must be prefilled, prompt and earlier outputs
    alive: bool = True  # False when the stay has ended


def make_request(
    submit: Submit, settings: SchedulerSettings, capacity: int, order: int, now: float
) -> Request:
    """A Request, or RequestError when it could never run. `capacity`: the KV pool's, in tokens."""
    sampling, wanted = submit.sampling, submit.logprobs
    length, context = len(submit.prompt_ids), settings.context_length
    longest = min(context - length, capacity - length + 1)  # the last token's KV is never needed
    limit = longest if sampling.max_new_tokens is None else sampling.max_new_tokens
    start = -1 if wanted is None else wanted.start_len
    if not 0 < length < context or length > capacity or length + limit > context or start > length:
        raise misfit(length, limit, start, context, capacity)
    try:
        prompt = np.array(submit.prompt_ids, np.int32)
    except OverflowError:
        raise unknown_ids(settings.vocab_size) from None
    if prompt.min() < 0 or prompt.max() >= settings.vocab_size:
        raise unknown_ids(settings.vocab_size)
    stop_ids = () if sampling.ignore_eos else (*settings.eos_token_ids, *sampling.stop_token_ids)
    logprobs = None if wanted is None else Logprobs(wanted, prompt)
    return Request(prompt, submit, limit, frozenset(stop_ids), order, now, logprobs)
