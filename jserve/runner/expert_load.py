"""How evenly a router spreads tokens: what a model with experts counts on the device, as numbers.

The device sums for ever (layers/expert_tally.py); each step hands out the sum as it is behind it.
It is copied to the host with a step's own results, and only now and then: when the last copy is
old, or nothing was launched behind the step, so that at rest the numbers are exact. Composed around
a Runner where a model has experts; knows no request. Legend: L sparse layers, E experts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from jserve.plan import StepOutcome, StepPlan
from jserve.runner.runner import InFlight, Runner
from jserve.types import MoEConfig

INTERVAL = 0.25  # seconds between two copies; the engine's gauges go as often
RECENT = 60.0  # seconds that the balance is taken over, up to twice as long


class ExpertLoad:
    """Tokens by layer and expert since the start. `layers`: the sparse ones' numbers."""

    def __init__(
        self, layers: Sequence[int], num_experts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layers, self._clock = layers, clock
        self.tokens = np.zeros((len(layers), num_experts), np.int64)  # [L, E]
        self._before, self._since = [self.tokens, self.tokens], clock()
        self._read = 0.0
        self.restart()

    def restart(self) -> None:
        """The device begins at zero again."""
        self._last = np.zeros(self.tokens.shape, np.int32)

    @property
    def due(self) -> bool:
        return self._clock() - self._read >= INTERVAL

    def take(self, tally: np.ndarray) -> None:
        """The device's int32 [L, E], of each rank where there are several ([D, L, E]); it may have
        wrapped since the last one."""
        tally = tally.reshape(-1, *self.tokens.shape).sum(axis=0, dtype=np.int32)
        self._read = now = self._clock()
        if now - self._since >= RECENT:
            self._before, self._since = [self._before[1], self.tokens], now
        new = tally.astype(np.uint32) - self._last.astype(np.uint32)
        self._last, self.tokens = tally, self.tokens + new

    def series(self) -> dict[str, float]:
        """The numbers as metrics/families.py names them: E + L of them."""
        totals = self.tokens.sum(axis=0).tolist()
        recent = self.tokens - self._before[0]
        most, mean = recent.max(axis=1), recent.mean(axis=1)
        balance = np.where(most > 0, mean / np.maximum(most, 1), 1.0).tolist()
        return {
            **{f"expert_tokens_total/{expert}": n for expert, n in enumerate(totals)},
            **{f"expert_balancedness/{i}": n for i, n in zip(self._layers, balance, strict=True)},
        }


def counted(runner: Runner, moe: MoEConfig | None, told: dict[str, Any]) -> Runner:
    """`runner`, composed with a CountedRunner, which does all that loops ask of one, where the
    model has sparse layers."""
    if moe is None or not moe.layers:
        return runner
    return cast("Runner", CountedRunner(runner, ExpertLoad(moe.layers, moe.num_experts), told))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CountedFlight:
    """A launched step and the counts behind it."""

    flight: InFlight
    tally: jax.Array
    runner: CountedRunner

    def read(self) -> StepOutcome:
        """As InFlight.read."""
        outcome = self.flight.read()
        self.runner.note(self)
        return outcome


class CountedRunner:
    """A Runner whose steps count; it does what a Runner does. `told["expert_tokens"]` is the counts
    [L][E], a new list with every copy.
    """

    def __init__(self, runner: Runner, load: ExpertLoad, told: dict[str, Any]) -> None:
        self._runner, self._load, self._told = runner, load, told
        self._latest: CountedFlight | None = None
        self._tell()

    def launch(self, plan: StepPlan) -> CountedFlight:
        flight = self._runner.launch(plan)
        assert flight.hidden is not None, f"step {plan.step} was finished before it began"
        (tally,) = flight.hidden.tally
        self._latest = CountedFlight(flight, tally, self)
        return self._latest

    def finish(self, flight: CountedFlight, mask: np.ndarray | None = None) -> None:
        self._runner.finish(flight.flight, mask)

    def note(self, flight: CountedFlight) -> None:
        """The step was read: its counts wait for nothing."""
        if flight is self._latest or self._load.due:
            self._load.take(np.asarray(flight.tally))
            self._tell()

    def reset(self) -> None:
        self._latest = None
        self._runner.reset()
        self._load.restart()

    def close(self) -> None:
        self._runner.close()

    @property
    def tokens(self) -> dict[str, float]:
        return {**self._runner.tokens, **self._load.series()}

    @property
    def recompiles(self) -> int:
        return self._runner.recompiles

    @property
    def compiled(self) -> tuple[int, int]:
        return self._runner.compiled

    def _tell(self) -> None:
        self._told["expert_tokens"] = self._load.tokens.tolist()
