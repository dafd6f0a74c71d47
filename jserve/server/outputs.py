"""Streams of Outputs, read to their end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from jserve.types import Output

Outputs = AsyncGenerator[Output, None]


async def finished(outputs: Outputs) -> list[Output]:
    """The last Output of each sequence, in order of their index."""
    async with contextlib.aclosing(outputs):
        last = [output async for output in outputs if output.finish is not None]
    return sorted(last, key=lambda output: output.index)
