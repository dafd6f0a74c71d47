"""Signs of life: an engine's gauges and counters, sent while it works and when it rests."""

from __future__ import annotations

import time

from jserve.engine.channel import EngineEnd
from jserve.engine.measured import Measured
from jserve.scheduler.scheduler import Scheduler
from jserve.types import Gauges

INTERVAL = 0.25  # seconds between two messages
_WINDOW = 1.0  # seconds over which throughput is measured, at least


class GaugeSender:
    """Counts throughput from the scheduler's total of generated tokens."""

    def __init__(self, scheduler: Scheduler, runner: Measured, channel: EngineEnd) -> None:
        self._scheduler, self._runner, self._channel = scheduler, runner, channel
        self._sent = self._throughput = self._counted = 0.0
        self._since = time.monotonic()

    def values(self) -> dict[str, float]:
        compiled, programs = self._runner.compiled
        return {
            **self._scheduler.stats(),
            **self._runner.tokens,
            "gen_throughput": self._throughput,
            "recompiles_total": float(self._runner.recompiles),
            "programs_pending": float(programs - compiled),
        }

    def step(self) -> None:
        """A step was committed."""
        if time.monotonic() - self._sent >= INTERVAL:
            self._send(resting=False)

    def rest(self) -> None:
        """No work: the throughput is zero until there is some."""
        self._send(resting=True)

    def _send(self, resting: bool) -> None:
        now, values = time.monotonic(), self.values()
        age, total = now - self._since, values["generation_tokens_total"]
        if resting or age >= _WINDOW:
            self._throughput = 0.0 if resting else (total - self._counted) / age
            self._counted, self._since = total, now
        values["gen_throughput"] = self._throughput
        self._sent, counters = now, self._scheduler.cache.counters
        times, step = counters.timing.numbers(), int(values["steps_total"])
        times["cache_match_tokens"] = [*counters.match_lengths, counters.matched_tokens]
        self._channel.send(Gauges(values=values, histograms=times, step=step, time=time.time()))
