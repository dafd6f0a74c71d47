"""Requests as SGLang's response bodies: as they come, or gathered in order."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jserve.engine.python_arguments import python_arguments
from jserve.engine.render import render_output
from jserve.engine.requests import check_ranks, expand
from jserve.types import GenerateRequest, Output

Generate = Callable[[Sequence[GenerateRequest]], AsyncGenerator[Output, None]]
IdToText = Callable[[int], str]
Body = dict[str, Any]


async def answer(
    generate: Generate, id_to_text: IdToText, num_ranks: int, *arguments: Any, **options: Any
) -> AsyncGenerator[Body, None] | list[Body] | Body:
    """What Engine.async_generate returns for these arguments."""
    options = python_arguments(arguments, options)
    requests, many = expand(**options)
    check_ranks(requests, num_ranks)
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
    ends = list(itertools.accumulate(request.sampling.n for request in requests))
    async with contextlib.aclosing(generate(requests)) as outputs:
        async for output in outputs:
            request = requests[bisect.bisect_right(ends, output.index)]
            place = {"index": output.index} if many else {}
            yield place | render_output(output, request, id_to_text)
