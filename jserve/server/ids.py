"""Ids that a request brings along: of tokens, and its own."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jserve.errors import RequestError


def check_ids(name: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Token ids in field `name`. Raises RequestError when they are not of this vocabulary."""
    if any(type(token) is not int for token in ids):
        raise RequestError(f"{name} must hold token ids only.", name)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(f"{name} must be ids in [0, {vocab_size}).", name)
    return list(ids)


def given_rids(rid: str | list[str], num_prompts: int) -> list[str]:
    """One request id a prompt: those given, or `<rid>_<i>` of one. Raises RequestError."""
    if isinstance(rid, str):
        rid = [rid] if num_prompts == 1 else [f"{rid}_{i}" for i in range(num_prompts)]
    twice = [one for one, count in collections.Counter(rid).items() if one and count > 1]
    if twice:
        message = f"rid {twice[0]} is in this batch twice; each prompt needs an id of its own."
        raise RequestError(message, "rid")
    if len(rid) != num_prompts or not all(rid):
        raise RequestError(f"rid must be {num_prompts} non-empty ids, got {rid}.", "rid")
    return rid
