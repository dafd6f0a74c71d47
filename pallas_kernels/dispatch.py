"""Picks one implementation of an op. Owns the rule, knows no op.

A named implementation is called as it is: what it cannot do is an error that names it. Without a
name the platform's order is tried, and an implementation says that it cannot serve a call by
raising NotImplementedError while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax

T = TypeVar("T")


def dispatch(
    implementations: Mapping[str, Callable[[], T]],
    orders: Mapping[str, Sequence[str]],
    *,
    name: str | None,
    platform: str | None,
) -> T:
    """Result of the named implementation, or of the first in `orders[platform]` that serves.

    `implementations` are applied to this call's arguments; `platform` None is this process's
    default backend. Raises ValueError for an unknown name or platform, NotImplementedError when
    nothing that was asked for serves the call.
    """
    platform = platform or jax.default_backend()
    if name is not None and name not in implementations:
        raise ValueError(f"unknown implementation {name!r}; known: {', '.join(implementations)}")
    if name is None and platform not in orders:
        raise ValueError(f"unknown platform {platform!r}; known: {', '.join(orders)}")
    reasons = []
    for candidate in orders[platform] if name is None else (name,):
        try:
            return implementations[candidate]()
        except NotImplementedError as error:
            reasons.append(f"{candidate}: {error}")
    raise NotImplementedError(f"nothing serves this call on {platform}: {'; '.join(reasons)}")
