"""A batch of requests as SGLang's response bodies: merged as they come, or gathered in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from jserve.engine.render import render_output
from jserve.engine.requests import expand
from jserve.types import GenerateRequest, Output

Generate = Callable[[GenerateRequest], AsyncGenerator[Output, None]]
IdToText = Callable[[int], str]
Body = dict[str, Any]


async def answer(
    generate: Generate, id_to_text: IdToText, *arguments: Any, **options: Any
) -> AsyncGenerator[Body, None] | list[Body] | Body:
    """What Engine.async_generate returns for these arguments of requests.expand."""
    requests, many = expand(*arguments, **options)
    bodies = _bodies(generate, id_to_text, requests, many)
    if options.get("stream"):
        return bodies
    done: dict[int, Body] = {}
    async with contextlib.aclosing(bodies):
        async for body in bodies:
            done[body.pop("index", 0)] = body
    return [done[index] for index in sorted(done)] if many else done[0]


async def _bodies(
    generate: Generate, id_to_text: IdToText, requests: list[GenerateRequest], many: bool
) -> AsyncGenerator[Body, None]:
    """Response bodies of all requests as they come; one that fails ends all."""
    merged: asyncio.Queue[Body | asyncio.Task[None]] = asyncio.Queue()

    async def pump(request: GenerateRequest, first_index: int) -> None:
        async with contextlib.aclosing(generate(request)) as outputs:
            async for output in outputs:
                body = render_output(output, request, id_to_text)
                place = {"index": first_index + output.index} if many else {}
                merged.put_nowait(place | body)

    tasks: list[asyncio.Task[None]] = []
    first_index = 0
    for request in requests:
        tasks.append(asyncio.create_task(pump(request, first_index)))
        tasks[-1].add_done_callback(merged.put_nowait)
        first_index += request.sampling.n
    num_open = len(tasks)
    try:
        while num_open:
            item = await merged.get()
            if isinstance(item, dict):
                yield item
            else:
                num_open -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
