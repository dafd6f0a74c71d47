"""How many sequences one body may ask for: prompts times n, counted before they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import RequestError

MAX_SEQUENCES = 4096


def check_count(num_prompts: int, wanted: int, field: str) -> None:
    """`wanted`: of all prompts, which are in `field`. Raises RequestError."""
    if max(num_prompts, wanted) > MAX_SEQUENCES:
        field = "n" if num_prompts == 1 else field
        rule = f"at most {MAX_SEQUENCES} sequences may be asked for at once, got {wanted}."
        raise RequestError(f"{field}: {rule}", field)


def num_sequences(num_prompts: int, params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """By the sampling parameters of /generate, one for all or one a prompt. What is no number of
    sequences is not refused here, and counts as one."""
    if isinstance(params, Mapping):
        return num_prompts * _num_of(params)
    return max(num_prompts, sum(map(_num_of, params)))


def _num_of(params: Mapping[str, Any]) -> int:
    n = params.get("n")
    return n if type(n) is int and n > 0 else 1
