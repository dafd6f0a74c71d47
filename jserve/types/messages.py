"""The messages between the two processes, and what enters and leaves the API process.

Pure data. Messages are msgspec structs so that ipc.py can encode them as they are.
"""

from __future__ import annotations

import io
from typing import Annotated

import msgspec

from jserve.types.grammar import CompiledSpec, Thinking
from jserve.types.logprobs import LogprobParams, TokenLogprobs
from jserve.types.sampling import SamplingParams

#: What a caller calls a request or a namespace; it is kept, logged and sent back.
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """API process → engine: one sequence to generate (n > 1 was expanded before)."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    extra_key: str | None = None  # cache namespace
    cache_salt: str | None = None  # second component of the namespace
    priority: int | None = None  # None: the default one
    stream: bool = False  # False: the engine may hold tokens back and send one Delta at the end
    created: float = 0.0  # time.time() in the API process
    sent: float = 0.0  # … when its prompt was ready
    waited: float = 0.0  # seconds, for its grammar
    turn: int = 0  # tells uses of one rid apart; its Deltas carry it
    grammar: CompiledSpec | None = None  # what its tokens must follow
    thinking: Thinking | None = None  # … behind this
    routed_dp_rank: int | None = None  # None: engine/placement.py chooses


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """API process → engine: end every request whose rid starts with `rid` (exact when `exact`); ""
    with abort_all ends all.

    `stopped` marks a stop-string hit found by the detokenizer: the request is over, no finish Delta
    is awaited.
    """

    rid: str = ""
    exact: bool = True
    abort_all: bool = False
    stopped: bool = False


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """API process → engine: a question answered once by ControlReply with the same id.

    `op`: "flush_cache" | "may_flush" (would that be refused?) | "server_info" | "shutdown" |
    "pause_generation" (mode) | "continue_generation".
    """

    id: str
    op: str
    args: dict[str, str | int | float | bool] = {}


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """SGLang's finish reason. `type`: stop (matched = token id or string) | length (length) | abort
    (message, status…)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engine → API process: what one request gained since its last Delta. `token_ids` holds the
    stop token too."""

    rid: str
    token_ids: list[int]
    turn: int = 0  # its Submit's
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # total so far
    num_retractions: int = 0
    logprobs: TokenLogprobs | None = None  # of `token_ids`
    input_logprobs: TokenLogprobs | None = None  # in the first Delta only
    queue_time: float = 0.0  # seconds from arrival in the engine to admission
    cache_seconds: float = 0.0  # of matching and allocating for it
    num_steps: int = 0  # that it took part in so far
    prefill_finished: float = 0.0  # time.time() when the first token was committed
    ended: float = 0.0  # … when its finish was decided; 0: it was refused
    dp_rank: int | None = None  # that serves it, where there are several


class Deltas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine → API process: all Deltas of one tick."""

    items: list[Delta]


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Engine → API process: the answer to one Control. `deaf`: data-parallel ranks that were asked
    and have not answered in time."""

    id: str
    ok: bool
    message: str = ""
    payload: dict = {}
    deaf: list[int] = []


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Engine → API process during start-up: `stage` weights | compile | ready | failed; lines are
    for the terminal."""

    stage: str
    done: int = 0
    total: int = 0
    message: str = ""
    payload: dict = {}  # with ready: server facts (max_total_num_tokens, context_length, …)


class Gauges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Engine → API process, at most a few times a second: the engine's gauges and counters for
    /metrics and health. `ranks`: those of each data-parallel rank that lives, where there are
    several; the others are then those of all together."""

    values: dict[str, float]
    histograms: dict[str, list[float]] = {}  # since the start; as metrics/histogram.py says
    step: int = 0
    time: float = 0.0
    ranks: dict[int, Gauges] = {}


ToEngine = Submit | Abort | Control
FromEngine = Deltas | ControlReply | Progress | Gauges


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A front (HTTP route, Engine method, CLI) → core.py: one prompt, before tokenization.
    Exactly one of text, input_ids.

    `logprobs` None: none wanted. `rid` None: drawn by the engine. `add_special` is False for
        rendered chat templates.
    """

    sampling: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    rid: Name | None = None
    logprobs: LogprobParams | None = None
    return_text_in_logprobs: bool = False
    extra_key: Name | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    add_special: bool = True
    created: float = 0.0  # time.time() when a server began with it; 0: now
    traceparent: str | None = None  # W3C: the span that it is part of
    log_metrics: bool = True  # False: no metric of requests counts it
    no_logs: bool = False  # the log of requests leaves it out
    require_reasoning: bool = False  # its syntax is that of what follows the thinking
    routed_dp_rank: int | None = None  # the data-parallel rank that must serve it


class Times(msgspec.Struct, kw_only=True):
    """When what happened to one sequence: time.time(), 0 when it has not; `queued` in seconds."""

    created: float = 0.0
    sent: float = 0.0  # to the engine, when the prompt was ready
    queued: float = 0.0
    cache: float = 0.0  # seconds
    prefill_finished: float = 0.0  # in the engine
    first_token: float = 0.0
    ended: float = 0.0  # in the engine
    latest: float = 0.0  # of what arrived
    num_steps: int = 0  # that it took part in
    shown: bool = False  # whether answers tell more than the end-to-end latency
    dp_rank: int | None = None  # that served it, where there are several


class Transcript(msgspec.Struct, kw_only=True):
    """What one sequence has said. It only grows at its end, so an Output is a beginning of it."""

    ids: list[int]
    text: io.StringIO
    logprobs: TokenLogprobs | None = None  # of `ids`
    input_logprobs: TokenLogprobs | None = None

    def score(self, delta: Delta) -> None:
        """Add the log-probabilities that came with its ids."""
        self.input_logprobs = delta.input_logprobs or self.input_logprobs
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or TokenLogprobs(token_ids=[], values=[])
            self.logprobs.extend(delta.logprobs)

    def cut(self, length: int) -> None:
        """Keep the first `length` ids: none of an Output may be among the others."""
        del self.ids[length:]
        if self.logprobs is not None:
            self.logprobs.cut(length)


class Output(msgspec.Struct, kw_only=True):
    """sequence.py → a front: what one sequence is worth so far. `index` tells the n sequences of
    one request apart.

    `delta` and `new_ids` are the gain since the previous Output of the same index; `text`,
    `output_ids` and the logprob lists are cumulative, and made when they are read: that takes as
    long as they are. `times` is the sequence's own record: what it says changes until the finish.
    """

    index: int
    rid: str
    transcript: Transcript
    text_len: int  # characters
    delta: str
    new_ids: list[int]
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    reasoning_tokens: int = 0
    times: Times = msgspec.field(default_factory=Times)
    prompt_ids: list[int] = []

    @property
    def text(self) -> str:
        return self.transcript.text.getvalue()[: self.text_len]

    @property
    def output_ids(self) -> list[int]:
        return self.transcript.ids[: self.completion_tokens]

    @property
    def output_logprobs(self) -> TokenLogprobs | None:
        """The transcript's own until more is said."""
        logprobs = self.transcript.logprobs
        return None if logprobs is None else logprobs.first(self.completion_tokens)

    @property
    def input_logprobs(self) -> TokenLogprobs | None:
        return self.transcript.input_logprobs
