"""What a program asks of whoever runs its model, and what it gets back.

`Backend` is the contract: async methods run on the backend's own loop and are cancelled with the
program; what a call costs comes back as Usage. Knows no expressions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jserve.lang.choices import ChoicesDecision, ChoicesMethod
from jserve.lang.errors import BackendError
from jserve.lang.loop import LoopThread
from jserve.lang.roles import RoleTemplate
from jserve.lang.sampling import Sampling

_GREEDY = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens: of prompts, those of them that were reused, generated ones; sums of `num_calls`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_calls: int = 0

    @property
    def computed_tokens(self) -> int:
        """Of prompts."""
        return self.prompt_tokens - self.cached_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.num_calls + other.num_calls,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """How much of a text, from its beginning, went through the backend before, as far as a branch
    of a program knows."""

    chars: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What stands before a call. `messages` are the whole ones, `role` and `opened` the role that
    is open and how much of its text there is; `name` is the variable that the answer is for."""

    text: str
    messages: Sequence[Mapping[str, Any]] = ()
    role: str | None = None
    opened: str = ""
    name: str | None = None
    seen: Seen = Seen()


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """An answer, or a piece of one. `text` and `meta` are lists when n > 1."""

    text: Any
    meta: Any
    usage: Usage

    @property
    def seen_tokens(self) -> int:
        """Of the text that now ends with the answer; the last token is not computed."""
        if self.usage.num_calls == 1:
            return self.usage.prompt_tokens + self.usage.completion_tokens - 1
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """`seen_tokens`: of the prompt."""

    decision: ChoicesDecision
    usage: Usage
    seen_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    usage: Usage
    seen_tokens: int = 0


def check_greedy(temperature: float) -> None:
    """Raises BackendError where a select would have to draw."""
    if temperature > _GREEDY:
        raise BackendError(f"select needs temperature 0, got {temperature}")


@runtime_checkable
class Backend(Protocol):
    """All raise BackendError, or RequestError for what is refused as written."""

    @property
    def loop(self) -> LoopThread: ...

    # On the loop.

    async def template(self) -> RoleTemplate:
        """How roles become text."""
        ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...

    def generate_stream(
        self, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Generation, None]:
        """Pieces of one answer; the last has the whole usage, those before have none."""
        ...

    async def select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesMethod
    ) -> Selection: ...

    async def commit(self, prompt: Prompt) -> Committed:
        """Compute the text once, so that what begins with it is reused."""
        ...

    # From any other thread.

    def get_model_name(self) -> str: ...

    def flush_cache(self) -> bool: ...

    def get_server_info(self) -> dict[str, Any]: ...

    def shutdown(self) -> None: ...
