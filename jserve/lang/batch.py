"""Many runs of one program at a time: threads, order, a progress bar, and an end that leaves none
behind."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import tqdm

from jserve.lang.errors import ExpressionError
from jserve.lang.state import ProgramState
from jserve.types.wording import written

CHUNK = 200  # items that a generator has under way at most
Arguments = Mapping[str, Any]
States = Generator[ProgramState, None, None]


def run(
    calls: Sequence[Arguments],
    make: Callable[[], ProgramState],
    drive: Callable[[ProgramState, Arguments], None],
    num_threads: int,
    window: int = CHUNK,
) -> States:
    """States of all `calls` in their order, each when it is over; `window` at most under way.

    Closing it, or an interrupt, cancels what is under way and waits for that.
    """
    if num_threads <= 1:
        for arguments in calls:
            state = make()
            drive(state, arguments)
            yield state
        return
    under_way: collections.deque[tuple[ProgramState, concurrent.futures.Future[None]]]
    under_way = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, "jserve-batch")
    try:
        for arguments in calls:
            if len(under_way) >= window:
                yield _first(under_way)
            state = make()
            under_way.append((state, pool.submit(drive, state, arguments)))
        while under_way:
            yield _first(under_way)
    finally:
        for state, future in under_way:
            future.cancel()
            state.cancel()
        pool.shutdown(wait=True)


def _first(
    under_way: collections.deque[tuple[ProgramState, concurrent.futures.Future[None]]],
) -> ProgramState:
    under_way[0][1].result()
    return under_way.popleft()[0]


def threads(wanted: int | str, size: int) -> int:
    """How many programs run at a time. Raises ExpressionError."""
    if wanted == "auto":
        wanted = max(96, 16 * (os.cpu_count() or 1))
    if not isinstance(wanted, int) or wanted < 1:
        raise ExpressionError(f"num_threads must be auto or >= 1, got {written(wanted)}.")
    return min(wanted, size)


def shown(states: Iterable[ProgramState], total: int) -> States:
    """The same, with a progress bar."""
    yield from _Bar(states, total=total, unit="program")


class _Bar(tqdm.tqdm):
    """Without the thread that watches for bars that stand still."""

    monitor_interval = 0
