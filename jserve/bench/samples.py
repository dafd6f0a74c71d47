"""What was seen of one request. Times in seconds, of time.perf_counter."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(slots=True)
class Sample:
    """A request as its client saw it; `error` is empty when it ended well."""

    prompt_len: int
    start: float = 0.0
    first: float = 0.0  # when the first token came
    last: float = 0.0  # … and the latest
    output_len: int = 0
    itls: list[float] = dataclasses.field(default_factory=list)
    cached_tokens: int | None = None  # the server's word, if it tells
    output_ids: list[int] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)  # see compare.py
    error: str = ""
    text: str = ""  # … of the answer, from a server

    @property
    def ttft(self) -> float:
        """0 when no token came, as in SGLang's results."""
        return max(self.first - self.start, 0.0)

    @property
    def latency(self) -> float:
        return max(self.last - self.start, 0.0)

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None when there is none."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)

    def arrived(self, output_len: int) -> None:
        """Output has grown to `output_len` tokens: k new ones share the gap evenly."""
        now, new = time.perf_counter(), output_len - self.output_len
        if new <= 0:
            return
        if not self.output_len:
            self.first = now
        else:
            self.itls += [(now - self.last) / new] * new
        self.last, self.output_len = now, output_len
