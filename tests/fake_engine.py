"""An engine without a model: its runner's next token is a formula; scheduler and loop are real.

The formula looks at the last token and the number of tokens before the next one, both taken from
what the plan says and what the slot remembers, so a wrong length, slot or order changes the text.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from typing import Any

import numpy as np

from jserve.cache.manager import CacheManager
from jserve.config import Config
from jserve.engine.loop import Loop
from jserve.metrics.step_clock import step_timing
from jserve.metrics.timing import UNTIMED, Timing
from jserve.plan import SampledLogprobs, ScoreOutcome, StepOutcome, StepPlan
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler
from jserve.types import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS, ModelConfig, RopeConfig

VOCAB = 256
CONTEXT = 512
PAGE = 4
MODEL = ModelConfig(
    architecture="FakeForCausalLM",
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position=CONTEXT,
    rope=RopeConfig(10_000.0),
    windows=(None,),
)


def next_token(last: int, length: int) -> int:
    """A lower-case letter."""
    return 97 + (last * 7 + length) % 26


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the engine must answer, one request at a time."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids[-1], len(ids)))
    return ids[len(prompt) :]


class ByteTokenizer:
    """One id a byte."""

    eos_token_ids: tuple[int, ...] = ()
    vocab_size = VOCAB
    longest_token = 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def pieces(self, ids: list[int], skip_special_tokens: bool) -> list[bytes]:
        return [bytes([i]) for i in ids]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def id_to_text(self, token_id: int) -> str:
        return chr(token_id)


@dataclasses.dataclass
class Flight:
    plan: StepPlan
    runner: ScriptedRunner
    tokens: np.ndarray | None = None

    def read(self) -> StepOutcome:
        self.runner.note("read", self.plan)
        assert self.tokens is not None, "read before finish"
        plan = self.plan
        logprobs = SampledLogprobs(*fake_logprobs(self.tokens)) if plan.logprobs else None
        score = ScoreOutcome(*fake_logprobs(plan.score.targets)) if plan.score else None
        return StepOutcome(self.tokens, logprobs, score)


def fake_logprobs(tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """The log-probability of token t is −t / 1000, the best ones are t, t + 1, …"""
    best = tokens[:, None] + np.arange(MAX_TOP_LOGPROBS)
    ids = np.repeat(-tokens[:, None] / 500, MAX_LOGPROB_IDS, axis=1)
    return tuple(
        array.astype(dtype)
        for array, dtype in (
            (-tokens / 1000, np.float32),
            (-best / 1000, np.float32),
            (best, np.int32),
            (ids, np.float32),
        )
    )


class ScriptedRunner:
    """Records what is asked of it in `events`, as (name, step)."""

    recompiles = 0
    compiled = (1, 1)

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.tokens: Counter[str] = Counter()
        self.events: list[tuple[str, int]] = []
        self.fail: set[tuple[str, int]] = set()  # (name, call number of that name) to raise at
        self.closed = False
        self._calls: dict[str, int] = {}
        self._last: dict[int, int] = {}
        self._step_seconds = step_seconds

    def note(self, name: str, plan: StepPlan) -> None:
        self.events.append((name, plan.step))
        self._calls[name] = self._calls.get(name, 0) + 1
        if (name, self._calls[name]) in self.fail:
            raise RuntimeError(f"scripted failure of {name}")

    def launch(self, plan: StepPlan) -> Flight:
        self.note("launch", plan)
        self.tokens[f"bucket_real_tokens_total/{plan.kind.value}"] += plan.num_tokens
        self.tokens[f"bucket_padded_tokens_total/{plan.kind.value}"] += 64
        time.sleep(self._step_seconds)
        return Flight(plan, self)

    def finish(self, flight: Flight, mask: np.ndarray | None = None) -> None:
        self.note("finish", flight.plan)
        plan, sampled = flight.plan, []
        ends = np.cumsum(plan.q_lens)
        for r, slot in enumerate(plan.slots.tolist()):
            token = int(plan.token_ids[ends[r] - 1])
            last = self._last[slot] if token == -1 else token
            if plan.samples[r]:
                self._last[slot] = next_token(last, int(plan.kv_lens[r]))
                sampled.append(self._last[slot])
        flight.tokens = np.array(sampled, np.int32)

    def reset(self) -> None:
        self.events.append(("reset", -1))
        self._last.clear()

    def close(self) -> None:
        self.closed = True


def make_scheduler(
    depth: int = 1, num_pages: int = 400, timing: Timing = UNTIMED, **settings: Any
) -> Scheduler:
    numbers: dict[str, Any] = {
        "num_slots": 16,
        "context_length": CONTEXT,
        "page_size": PAGE,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 256,
        "vocab_size": VOCAB,
        "lookahead": depth,
    }
    cache = CacheManager(num_pages, PAGE, timing=timing)
    return Scheduler(SchedulerSettings(**numbers | settings), cache)


def build(config: Config, channel: Any) -> Loop:
    """What Engine(builder="tests.fake_engine:build") runs; 1 ms a step."""
    timing = step_timing() if config.server.enable_metrics else UNTIMED
    scheduler = make_scheduler(timing=timing)
    return make_loop(channel, ScriptedRunner(0.001), scheduler=scheduler, watchdog_timeout=30.0)


def build_dying(config: Config, channel: Any) -> Loop:
    """Fails at the third launch, resets, and fails again."""
    runner = ScriptedRunner(0.001)
    runner.fail = {("launch", 3), ("launch", 5)}
    return make_loop(channel, runner)


def build_hanging(config: Config, channel: Any) -> Loop:
    return make_loop(channel, ScriptedRunner(2.0), watchdog_timeout=0.3)


def build_impatient(config: Config, channel: Any) -> Loop:
    """No request may run for longer than 0.1 s, i.e. about 100 tokens; 0.05 s in the queue."""
    limits = {"req_running_timeout": 0.1, "req_waiting_timeout": 0.05}
    return make_loop(
        channel, ScriptedRunner(0.001), scheduler=make_scheduler(1, num_slots=1, **limits)
    )


def build_refused(config: Config, channel: Any) -> Loop:
    from jserve.errors import WeightError

    raise WeightError("model.safetensors: tensor lm_head.weight is missing")


def build_exiting(config: Config, channel: Any) -> Loop:
    os._exit(7)


def build_rank_1_refused(config: Config, channel: Any) -> Loop:
    return (build_refused if config.replica.rank == 1 else build)(config, channel)


def build_rank_1_exiting(config: Config, channel: Any) -> Loop:
    return (build_exiting if config.replica.rank == 1 else build)(config, channel)


def build_faulty_ranks(config: Config, channel: Any) -> Loop:
    """Rank 0 serves, rank 1 fails twice, rank 2 hangs."""
    return (build, build_dying, build_hanging)[config.replica.rank](config, channel)


def build_storm(config: Config, channel: Any) -> Loop:
    """Rank 2 fails for good after a while."""
    runner = ScriptedRunner(0.001)
    runner.fail = {("launch", 150), ("launch", 160)} if config.replica.rank == 2 else set()
    return make_loop(channel, runner)


def make_loop(channel: Any, runner: ScriptedRunner, depth: int = 1, **options: Any) -> Loop:
    scheduler = options.pop("scheduler", None) or make_scheduler(depth)
    facts = {
        "max_running_requests": 16,
        "model_config": dataclasses.asdict(MODEL),
        "context_length": CONTEXT,
        "page_size": PAGE,
        "pid": os.getpid(),
    }
    return Loop(scheduler, runner, channel, depth=depth, page_size=PAGE, facts=facts, **options)
