"""Engines that differ in one mechanism each, on one workload: what it gains, and that the answers
stay the same.

A difference is legitimate only at a near tie: where the first arm's log-probabilities of the best
two tokens are closer than MARGIN, another batch composition may decide otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jserve.bench.load import run_load
from jserve.bench.report import summarize
from jserve.bench.samples import Sample
from jserve.bench.targets import EngineTarget, Generator
from jserve.bench.workload import WorkloadOptions, make_workload
from jserve.config import Config
from jserve.errors import ConfigError

#: Difference of log-probabilities under which two tokens tie, by number format.
MARGIN = {"float32": 0.01, "bfloat16": 0.3}


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """Flags over those given, and a grammar: its answers are others, and are checked against it."""

    flags: dict[str, Any]
    regex: str | None = None


#: The first is what the others are compared with.
ARMS = {
    "plain": Arm({"disable_radix_cache": True, "schedule_policy": "fcfs"}),
    "radix": Arm({"disable_radix_cache": False, "schedule_policy": "lpm"}),
    "grammar": Arm({"disable_radix_cache": True, "schedule_policy": "fcfs"}, r"[a-z ,.]{4000,}"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """How the answers of an arm relate to the first arm's."""

    equal: int
    ties: int  # first difference at a near tie
    different: int


def compare_arms(
    config: Config,
    arms: Sequence[str],
    workload: WorkloadOptions,
    start: Callable[[Config], Any],
) -> list[dict[str, Any]]:
    """Run each arm with an engine of its own; a dict an arm, the first arm's answers the measure.

    Args:
        start: from a Config to an engine, a context manager.
    """
    unknown = [name for name in arms if name not in ARMS]
    if unknown:
        raise ConfigError(f"--arms knows {', '.join(ARMS)}, got {unknown[0]}")
    results: list[dict[str, Any]] = []
    reference: list[Sample] = []
    for name in arms:
        arm = ARMS[name]
        with start(Config.from_flags(**{**config.flat(), **arm.flags})) as engine:
            vocab_size = engine.model_config.vocab_size
            conversations = make_workload(workload, vocab_size, engine.tokenizer)
            arrivals = np.zeros(len(conversations))
            load = run_load(EngineTarget(engine, regex=arm.regex), conversations, arrivals)
            samples, seconds = asyncio.run(load)
            info = engine.get_server_info()
            if not reference:
                reference = asyncio.run(_with_margins(engine, conversations))
            if arm.regex is None:
                answers = compare_answers(reference, samples, MARGIN[info["dtype"]])
            else:
                answers = check_answers(engine.tokenizer.decode, samples, arm.regex)
        figures = summarize(samples, seconds)
        results.append(
            {
                "name": name,
                "flags": arm.flags,
                "regex": arm.regex,
                "equal_answers": answers.equal,
                "near_ties": answers.ties,
                "different_answers": answers.different,
                "prefill_tokens": info["prefill_tokens_total"],
                **figures,
            }
        )
    return results


def compare_answers(
    reference: Sequence[Sample], samples: Sequence[Sample], margin: float
) -> Answers:
    """Compare greedy answers up to each one's first difference."""
    equal = ties = 0
    for wanted, got in zip(reference, samples, strict=True):
        pairs = zip(wanted.output_ids, got.output_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and len(wanted.output_ids) == len(got.output_ids) and not got.error:
            equal += 1
        elif at is not None and wanted.margins[at] < margin:
            ties += 1
    return Answers(equal, ties, len(samples) - equal - ties)


def check_answers(
    decode: Callable[[Sequence[int]], str], samples: Sequence[Sample], regex: str
) -> Answers:
    """Those that could go on to match {4000,} of a class of letters, by Python's own `re`, are
    equal."""
    letters = re.compile(regex.replace("{4000,}", "*"))
    good = [not s.error and bool(letters.fullmatch(decode(s.output_ids))) for s in samples]
    return Answers(sum(good), 0, len(good) - sum(good))


async def _with_margins(engine: Generator, conversations: Sequence[Any]) -> list[Sample]:
    """The answers once more, with the margin of each token; not timed."""
    target = EngineTarget(engine, stream=False, margins=True)
    samples, _ = await run_load(target, conversations, np.zeros(len(conversations)))
    return samples
