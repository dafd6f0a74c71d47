"""Outputs of several requests at once, the prefix that their prompts share computed once before.

Knows nothing of how a request came about, or of what its Outputs become.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from jserve.engine.core import EngineCore
from jserve.engine.fanout import fan_out, sequence_ids
from jserve.engine.ranges import check_ranges
from jserve.engine.warm_up import shared_prefixes, warm_up
from jserve.errors import RequestError
from jserve.types import GenerateRequest, Output

_T = TypeVar("_T")


async def generate_batch(
    core: EngineCore, page_size: int, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[Output, None]:
    """Outputs of all requests as they come; `index` counts the sequences of all of them.

    What is wrong with one is raised before any starts. The first error ends all of them, and so
    does closing this.
    """
    rids = [request.rid or uuid.uuid4().hex for request in requests]
    for request in requests:
        check_ranges(request.sampling, core.limits[0])
    _check_apart(requests, rids)
    with contextlib.ExitStack() as stack:
        claims = [
            stack.enter_context(core.claim(request, rid))
            for request, rid in zip(requests, rids, strict=True)
        ]
        submits = await _together(map(core.submit, requests, rids, claims))
        cache, client = core.config.cache, core.client
        if not cache.disable_radix_cache and (prefixes := shared_prefixes(submits, page_size)):
            await warm_up(client, prefixes, itertools.chain(*claims))
        each = zip(submits, claims, strict=True)
        parts = await _together(fan_out(submit, own, client, cache) for submit, own in each)
        asked = list(zip(requests, submits, parts, strict=True))
        async with contextlib.aclosing(core.outputs(asked)) as outputs:
            async for output in outputs:
                yield output


def _check_apart(requests: Sequence[GenerateRequest], rids: Sequence[str]) -> None:
    """Raises RequestError: who repeats an id has not met another's, which may be tried again. Each
    `n` is within its range."""
    seen: set[str] = set()
    for request, rid in zip(requests, rids, strict=True):
        for name in sequence_ids(rid, request.sampling.n):
            if name in seen:
                rule = "each sequence needs an id of its own: rid, or rid_0, rid_1 … where n > 1."
                raise RequestError(f"rid {name} is in this batch twice; {rule}", "rid")
            seen.add(name)


async def _together(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of all; the first error ends all. They do not start in one go: others may run
    between two of them.
    """
    tasks: list[asyncio.Task[_T]] = []
    try:
        for work in works:
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
