"""What gauges are read from a runner, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Measured(Protocol):
    @property
    def tokens(self) -> Mapping[str, float]:
        """Of the steps launched, by kind."""
        ...

    @property
    def recompiles(self) -> int: ...

    @property
    def compiled(self) -> tuple[int, int]:
        """(programs compiled, programs in all)."""
        ...
