"""Who is told of every request that comes and every sequence that ends: logs and traces."""

from __future__ import annotations

from typing import Protocol

from jserve.types import GenerateRequest, Output, Submit


class Reporter(Protocol):
    """Called on the event loop of the request; must not block and must not raise."""

    def received(self, request: GenerateRequest, submit: Submit) -> None:
        """A request was accepted: `submit` is what the engine gets of it, but for n."""
        ...

    def ended(self, request: GenerateRequest, rid: str, output: Output | None) -> None:
        """A sequence of it is over, `output` being the last, which nobody may have read; None: the
        client left before."""
        ...
