"""Speculation on somebody else's API: one long answer, cut where later generations begin.

A generation with stop strings is asked for without them; what the model wrote behind the stop is
kept, and as long as the program's own text is what the model wrote, later generations are read from
it and cost no call. For completion models, which bill every call with its whole prompt.
"""

from __future__ import annotations

import dataclasses

from jserve.lang.backends.base import Backend, Generation, Prompt, Usage
from jserve.lang.sampling import Sampling


class Ahead:
    """What the model wrote beyond the program's text. `num_tokens` of one long answer; None: never
    look ahead."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._text = ""

    def follow(self, text: str) -> None:
        """The program goes on with `text`; what the model wrote counts only if it did, too."""
        same = self._text.startswith(text)
        self._text = self._text.removeprefix(text) if same else ""

    async def generate(self, backend: Backend, prompt: Prompt, sampling: Sampling) -> Generation:
        """As the backend's own, without a call when the answer is there already."""
        if self._num_tokens is None or not _plain(sampling):
            self._text = ""
            return await backend.generate(prompt, sampling)
        stops, usage = sampling.stop or (), Usage()
        if not any(stop in self._text for stop in stops):
            longer = dataclasses.replace(sampling, max_new_tokens=self._num_tokens, stop=())
            answer = await backend.generate(prompt, longer)
            self._text, usage = str(answer.text), answer.usage
        ends = {self._text.find(stop): stop for stop in stops if stop in self._text}
        end = min(ends, default=len(self._text))
        text, self._text = self._text[:end], self._text[end:]
        finish = {"type": "stop", "matched": ends[end]} if ends else {"type": "length"}
        return Generation(text, {"finish_reason": finish, "speculated": not usage.num_calls}, usage)


def _plain(sampling: Sampling) -> bool:
    """One free answer that ends at a text, and without it."""
    free = sampling.constraint is None and not sampling.no_stop_trim
    return bool(sampling.stop) and sampling.n == 1 and free
