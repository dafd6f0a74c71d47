"""Watches a loop from a thread of its own, and speaks up when a step hangs."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("jserve.engine")


class Watchdog:
    """Dumps all stacks and calls `on_hang`, from its thread, when `busy_since` is `timeout` seconds
    ago, without those in which the whole process was stopped; once a tick that hangs.

    Args:
        timeout: 0: there is no watchdog.
        busy_since: when the running tick began (time.monotonic()); None between two.
    """

    def __init__(
        self, timeout: float, busy_since: Callable[[], float | None], on_hang: Callable[[], None]
    ) -> None:
        self._timeout = timeout
        self._busy_since = busy_since
        self._on_hang = on_hang
        self._stopped = threading.Event()
        if timeout > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        pause = min(self._timeout / 4, 5.0)
        running = told = None  # ticks, by when they began
        age, last = 0.0, time.monotonic()
        while not self._stopped.wait(pause):
            now, since = time.monotonic(), self._busy_since()
            awake, last = min(now - last, 2 * pause), now  # all of this process may be stopped
            if since is None or since != running:
                running, age = since, min(now - (since or now), awake)
            else:
                age += awake
            if since is not None and since != told and age > self._timeout:
                told = since
                logger.critical("a step takes more than %g s; all stacks follow", self._timeout)
                faulthandler.dump_traceback()
                self._on_hang()


def start_watchdogs(
    timeout: float,
    soft_timeout: float,
    busy_since: Callable[[], float | None],
    on_hang: Callable[[], None],
) -> Callable[[], None]:
    """One that calls `on_hang`, and one that only dumps the stacks; → what stops both."""
    ends = ((timeout, on_hang), (soft_timeout, lambda: None))
    watchdogs = [Watchdog(seconds, busy_since, end) for seconds, end in ends]

    def stop() -> None:
        for watchdog in watchdogs:
            watchdog.stop()

    return stop
