"""Outputs of several requests at once, the prefix that their prompts share computed once before.

Knows nothing of how a request came about, or of what its Outputs become.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from jserve.engine.claims import claimed, forget
from jserve.engine.core import EngineCore
from jserve.engine.submission import make_submit
from jserve.engine.warm_up import shared_prefixes, warm_up
from jserve.types import Abort, GenerateRequest, Output, Submit

Outputs = AsyncGenerator[Output, None]


async def generate_batch(
    core: EngineCore, page_size: int, requests: Sequence[GenerateRequest]
) -> Outputs:
    """Outputs of all requests as they come; `index` counts the sequences of all of them.

    What is wrong with one is raised before any starts. The first error ends all of them, and so
    does closing this.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(core.generate_stream(requests[0])) as outputs:
            async for output in outputs:
                yield output
        return
    core.client.require_alive()
    claims: dict[str, list[Abort]] = {}
    try:
        submits = await _submits(core, requests, claims)
        cached = not core.config.cache.disable_radix_cache
        prefixes = shared_prefixes(submits, page_size) if cached else []
        if prefixes:
            await warm_up(core.client, prefixes, claims)
        streams = map(core.generate_stream, requests, submits)
        sizes = [request.sampling.n for request in requests]
        async with contextlib.aclosing(merged(list(streams), sizes)) as outputs:
            async for output in outputs:
                yield output
    finally:  # a stream that has not begun sends nothing
        forget(core.client, claims)


async def _submits(
    core: EngineCore, requests: Sequence[GenerateRequest], claims: dict[str, list[Abort]]
) -> list[Submit]:
    """Of all requests, whose grammars are compiled beside each other; what they claim is put into
    `claims`, which owns it. The first error ends it.
    """
    limits, client = (core.vocab_size, core.context_length), core.client

    async def one(request: GenerateRequest) -> Submit:
        submit = await make_submit(request, core.tokenizer, limits, core.grammars)
        submit, own = claimed(client, submit)
        claims.update(own)
        return submit

    tasks: list[asyncio.Task[Submit]] = []
    try:
        for request in requests:
            tasks.append(asyncio.create_task(one(request)))
            await asyncio.sleep(0)  # others may run between two texts
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[Outputs], sizes: Sequence[int]) -> Outputs:
    """The Outputs of `streams`, of so many sequences each, counted through in `index`."""
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()

    async def pump(stream: Outputs, base: int) -> None:
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    output.index += base
                    queue.put_nowait(output)
            queue.put_nowait(None)
        except Exception as error:  # raised by whoever reads the queue
            queue.put_nowait(error)

    tasks, base = [], 0
    for stream, size in zip(streams, sizes, strict=True):
        tasks.append(asyncio.create_task(pump(stream, base)))
        base += size
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
