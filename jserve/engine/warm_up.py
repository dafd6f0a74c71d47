"""Prompts that are computed before the requests that share them start, so that these find them in
the prefix cache.

Owns what is worth it. Knows nothing of the cache but its page size;
that requests which are already there share a prefix is the scheduler's to see.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jserve.engine.aborts import all_aborted
from jserve.engine.client import EngineClient
from jserve.engine.refusals import raise_refusal
from jserve.engine.route import Route
from jserve.types import Delta, SamplingParams, Submit

MIN_SHARED = 64  # tokens; shorter ones take less time to compute again than to wait for


async def warm_up(
    client: EngineClient, prompts: Sequence[Submit], waiting: Iterable[Route]
) -> None:
    """Compute the prompts. What is `waiting` starts behind it, unless this raises.

    Raises what a prompt is refused with. One that is aborted is not waited for any longer.
    """
    if all_aborted(waiting):
        return
    inbox = asyncio.Queue[Delta]()
    with client.claim([one.rid for one in prompts]):
        client.submit(prompts, inbox.put_nowait)
        for _ in prompts:
            while (delta := await inbox.get()).finish is None:
                pass
            client.close(delta.rid)
            raise_refusal(delta.finish)


def prefix_of(submit: Submit, rid: str, length: int) -> Submit:
    """The first `length` tokens of the prompt as a request, in the same namespace."""
    ids, nothing = submit.prompt_ids[:length], SamplingParams(max_new_tokens=0)
    plain = {"sampling": nothing, "logprobs": None, "grammar": None, "thinking": None}
    return msgspec.structs.replace(submit, rid=rid, prompt_ids=ids, **plain)


def shared_prefixes(submits: Sequence[Submit], page_size: int) -> list[Submit]:
    """For each cache namespace, the prefix of whole pages that all its prompts begin with, if it is
    long enough. Prompts that cannot reuse that much are left aside.
    """
    spaces: dict[tuple[str | None, str | None], list[Submit]] = {}
    for submit in submits:
        if reusable(submit) >= MIN_SHARED:
            spaces.setdefault((submit.extra_key, submit.cache_salt), []).append(submit)
    prefixes = []
    for members in spaces.values():
        common = _num_common([one.prompt_ids for one in members])
        length = min(common, *map(reusable, members)) // page_size * page_size
        if len(members) > 1 and length >= MIN_SHARED:
            # what aborts all members by their common beginning aborts this
            rid = members[0].rid[: _num_common([one.rid for one in members])]
            prefixes.append(prefix_of(members[0], f"{rid}_{uuid.uuid4().hex}", length))
    return prefixes


def reusable(submit: Submit) -> int:
    """Prompt tokens that may come from the cache: not the last, nor those that are scored."""
    most = len(submit.prompt_ids) - 1
    if submit.logprobs is None or submit.logprobs.start_len < 0:
        return most
    return min(most, submit.logprobs.start_len)


def _num_common(lists: Sequence[Any]) -> int:
    """How many items all the lists, or texts, begin with."""
    first, last = min(lists), max(lists)  # of all, these have the least in common
    pairs = enumerate(zip(first, last, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(last)))
