"""Three kinds of traffic, each drawn from one seed: lengths, tokens and times of arrival."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from simulation import VOCAB, FollowUp, Job

_BLOCK = 4096


def _lognormal(rng: np.random.Generator, median: float, sigma: float, most: int) -> Iterator[int]:
    while True:
        block = np.exp(rng.normal(np.log(median), sigma, _BLOCK))
        yield from np.clip(block, 4, most).astype(int).tolist()


def _arrivals(rng: np.random.Generator, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        for gap in rng.exponential(1 / rate, _BLOCK).tolist():
            now += gap
            yield now


def _words(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(1, VOCAB, n, dtype=np.int32)


def sharegpt(n: int, rate: float, important: float = 0.0, seed: int = 0) -> Iterator[Job]:
    """Chats of log-normal lengths that share nothing but one system prompt; `important`: the part
    of them with a priority.
    """
    rng = np.random.default_rng(seed)
    system = _words(rng, 80)
    questions, answers = _lognormal(rng, 120, 1.0, 2000), _lognormal(rng, 80, 0.8, 400)
    times = _arrivals(rng, rate)
    for _ in range(n):
        prompt = np.concatenate([system, _words(rng, next(questions))])
        priority = 100 if important and rng.random() < important else None
        answer = next(answers)
        yield Job(next(times), prompt, answer, -(-answer // 64) * 64, priority)


def few_shot(n: int, rate: float, num_groups: int = 500, seed: int = 1) -> Iterator[Job]:
    """Short questions behind long prefixes, few of which are asked for most of the time (Zipf)."""
    rng = np.random.default_rng(seed)
    prefixes = [_words(rng, length) for length in rng.integers(300, 1500, num_groups).tolist()]
    popular = 1 / np.arange(1, num_groups + 1)
    popular /= popular.sum()
    questions, answers = _lognormal(rng, 40, 0.5, 200), _lognormal(rng, 24, 0.7, 128)
    times = _arrivals(rng, rate)
    for _ in range(n):
        group = int(rng.choice(num_groups, p=popular)) if num_groups > 1 else 0
        prompt = np.concatenate([prefixes[group], _words(rng, next(questions))])
        yield Job(next(times), prompt, next(answers), 256)


def conversations(
    n: int, rate: float, turns: int = 5, seed: int = 2
) -> tuple[Iterator[Job], FollowUp]:
    """`n` requests in conversations of up to 2 · `turns` − 1 turns; each turn's prompt is all that
    was said before and a new question, some time after the answer.
    """
    rng = np.random.default_rng(seed)
    system = _words(rng, 48)
    questions, answers = _lognormal(rng, 80, 0.8, 400), _lognormal(rng, 50, 0.7, 200)
    times = _arrivals(rng, rate)
    left = n

    def starts() -> Iterator[Job]:
        nonlocal left
        while left > 0:
            more = min(int(rng.integers(0, 2 * turns - 1)), left - 1)
            left -= 1 + more
            prompt = np.concatenate([system, _words(rng, next(questions))])
            yield Job(next(times), prompt, next(answers), 512, turns_left=more)

    def follow_up(job: Job, answer: np.ndarray, now: float) -> Job | None:
        if not job.turns_left:
            return None
        prompt = np.concatenate([job.prompt, answer, _words(rng, next(questions))])
        arrival = now + float(rng.exponential(8.0))
        return Job(arrival, prompt, next(answers), 512, turns_left=job.turns_left - 1)

    return starts(), follow_up
