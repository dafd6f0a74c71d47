"""The messages between the two processes, and what enters and leaves the API process.

Pure data. Messages are msgspec structs so that ipc.py can encode them as they are.
"""

from __future__ import annotations

import msgspec

from jserve.types.logprobs import LogprobParams, TokenLogprobs
from jserve.types.sampling import SamplingParams


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """API process → engine: one sequence to generate (n > 1 was expanded before)."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    extra_key: str | None = None  # cache namespace
    cache_salt: str | None = None  # second component of the namespace
    stream: bool = False  # False: the engine may hold tokens back and send one Delta at the end
    created: float = 0.0  # time.time() in the API process


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

    `op`: "flush_cache" | "server_info" | "shutdown".
    """

    id: str
    op: str


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
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # total so far
    num_retractions: int = 0
    logprobs: TokenLogprobs | None = None  # of `token_ids`
    input_logprobs: TokenLogprobs | None = None  # in the first Delta only
    queue_time: float = 0.0  # seconds from arrival in the engine to admission
    prefill_finished: float = 0.0  # time.time() when the first token was committed


class Deltas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine → API process: all Deltas of one tick."""

    items: list[Delta]


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Engine → API process: the answer to one Control."""

    id: str
    ok: bool
    message: str = ""
    payload: dict = {}


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
    /metrics and health."""

    values: dict[str, float]
    step: int = 0
    time: float = 0.0


ToEngine = Submit | Abort | Control
FromEngine = Deltas | ControlReply | Progress | Gauges


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A front (HTTP route, Engine method, CLI) → engine.py: one prompt, before tokenization.
    Exactly one of text, input_ids.

    `logprobs` None: none wanted. `rid` None: drawn by the engine. `add_special` is False for
        rendered chat templates.
    """

    sampling: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    rid: str | None = None
    logprobs: LogprobParams | None = None
    return_text_in_logprobs: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    add_special: bool = True


class Times(msgspec.Struct, kw_only=True):
    """When what happened to one sequence: time.time(), 0 when it has not; `queued` in seconds."""

    created: float = 0.0
    queued: float = 0.0
    prefill_finished: float = 0.0  # in the engine
    first_token: float = 0.0
    latest: float = 0.0  # of what arrived
    shown: bool = False  # whether answers tell more than the end-to-end latency


class Output(msgspec.Struct, kw_only=True):
    """engine.py → a front: what one sequence is worth so far. `index` tells the n sequences of one
    request apart.

    `delta` and `new_ids` are the gain since the previous Output of the same index; `text`,
    `output_ids` and the logprob lists are cumulative. `times` is the sequence's own record: what it
    says changes until the finish.
    """

    index: int
    rid: str
    text: str
    delta: str
    output_ids: list[int]
    new_ids: list[int]
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    times: Times = msgspec.field(default_factory=Times)
    output_logprobs: TokenLogprobs | None = None  # cumulative
    input_logprobs: TokenLogprobs | None = None
    prompt_ids: list[int] = []
