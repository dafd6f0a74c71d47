"""Sends a workload: conversations begin as they arrive, at most so many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from jserve.bench.samples import Sample
from jserve.bench.targets import Target
from jserve.bench.workload import Conversation
from jserve.errors import ConfigError


async def run_load(
    target: Target,
    conversations: Sequence[Conversation],
    arrivals: np.ndarray,
    *,
    max_concurrency: int | None = None,
    done: Callable[[Sample], None] = lambda sample: None,
) -> tuple[list[Sample], float]:
    """→ (a Sample a turn, conversations in order; seconds from the first to the last).

    A conversation whose turn fails ends there. `done` is told of each Sample as it ends.
    """
    if any(len(turns) > 1 for turns in conversations) and not target.knows_ids:
        raise ConfigError("a workload of several turns needs a backend that returns token ids")
    gate = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    start = time.perf_counter()

    async def converse(turns: Conversation, arrival: float) -> list[Sample]:
        await asyncio.sleep(arrival - (time.perf_counter() - start))
        history: list[int] = []
        samples: list[Sample] = []
        for turn in turns:
            history += turn.new_ids
            async with gate:
                sample = await target.ask(history, turn.max_new_tokens)
            samples.append(sample)
            done(sample)
            if sample.error:
                break
            history += sample.output_ids
        return samples

    tasks = [
        asyncio.ensure_future(converse(turns, float(arrival)))
        for turns, arrival in zip(conversations, arrivals, strict=True)
    ]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    seconds = time.perf_counter() - start
    return [sample for samples in results for sample in samples], seconds
