"""Streams of Outputs: of several requests at once, of requests that are logged, to their end.

Knows GenerateRequest and Output; nothing of HTTP. A stream that is closed closes what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from jserve.engine.engine import Engine
from jserve.types import GenerateRequest, Output

_logger = logging.getLogger("jserve.server")

Outputs = AsyncGenerator[Output, None]


async def merged(engine: Engine, requests: Sequence[GenerateRequest]) -> Outputs:
    """Run several requests at once; `index` counts the sequences of all of them.

    The first error ends all of them, and so does closing this.
    """
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()

    async def pump(request: GenerateRequest, base: int) -> None:
        try:
            async with contextlib.aclosing(engine.generate_stream(request)) as outputs:
                async for output in outputs:
                    output.index += base
                    queue.put_nowait(output)
            queue.put_nowait(None)
        except Exception as error:  # raised by whoever reads the queue
            queue.put_nowait(error)

    tasks, base = [], 0
    for request in requests:
        tasks.append(asyncio.create_task(pump(request, base)))
        base += request.sampling.n
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def logged(outputs: Outputs, requests: Sequence[GenerateRequest]) -> Outputs:
    started = time.monotonic()
    for one in requests:
        _logger.info("request %s: stream=%s %s", one.rid, one.stream, one.sampling)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if output.finish is not None:
                seconds = time.monotonic() - started
                _logger.info("finished %s in %.3f s: %s", output.rid, seconds, output.finish)
            yield output


async def finished(outputs: Outputs) -> list[Output]:
    """The last Output of each sequence, in order of their index."""
    async with contextlib.aclosing(outputs):
        last = [output async for output in outputs if output.finish is not None]
    return sorted(last, key=lambda output: output.index)
