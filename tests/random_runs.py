"""Runs of hypothesis state machines that must have met certain events to prove anything.

What a seed makes happen changes with hypothesis and with every module that is imported, because
hypothesis draws from their constants. So no single run is relied on: others follow, each with a
seed of its own, until all has happened.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MOST_ROUNDS = 40


def run_rounds(
    machine: type[RuleBasedStateMachine],
    examples: int,
    steps: int,
    met: Callable[[], bool] = lambda: True,
    rounds: int = 4,
    first_seed: int = 0,
) -> None:
    """At least `examples` runs of `steps` events, in `rounds`; then more rounds until `met()`. That
    it was, the caller asserts in words of its own.
    """
    for number in range(MOST_ROUNDS):
        if number >= rounds and met():
            return
        run_state_machine_as_test(
            seed(first_seed + number)(machine),
            settings=settings(
                max_examples=-(-examples // rounds),
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
