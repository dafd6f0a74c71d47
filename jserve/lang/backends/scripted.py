"""A backend without a model: answers come from a script, for unit tests of programs.

Its tokens are characters, its cache remembers every text it was asked about, so that a test also
sees what a program reuses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar

from jserve.lang.backends.base import (
    Committed,
    Generation,
    Prompt,
    Selection,
    Usage,
    check_greedy,
)
from jserve.lang.backends.prefixes import Kept, Prefixes
from jserve.lang.backends.rules import Ended, Rules, check_prompt, rules_of
from jserve.lang.choices import ChoicesDecision, ChoicesMethod
from jserve.lang.errors import BackendError, ExpressionError
from jserve.lang.loop import LoopThread
from jserve.lang.named_templates import named_template
from jserve.lang.roles import RoleTemplate
from jserve.lang.sampling import Sampling

#: A text, an error to raise, or what makes one of the prompt so far.
Answer = str | Exception | Callable[[str], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What was asked. `kind`: generate, select or commit."""

    kind: str
    name: str | None
    prompt: Kept
    sampling: Sampling | None = None
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt.text

    def __repr__(self) -> str:
        return f"Call({self.kind!r}, {self.name!r}, {self.text!r})"


class TestBackend:
    """Answers `gen` and `select` by the name of their variable.

    Args:
        answers: one Answer a name, or a list of them for successive calls; for `select` a choice,
            the first one when the script says nothing. None is the name of what has none. Of n
            answers each takes its own: the next ones of a list, the same text n times.
        chat_template_name: how roles become text.

    An answer that the call would not allow (regex, json_schema, choices) is a BackendError, and
    so is a `gen` that has none. A call that an engine would refuse is refused as there. Stops
    end an answer; one that they or max_tokens cut need only begin as its regex or json_schema
    says. `calls` holds what was asked. Raises ExpressionError for answers of another kind.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes called Test…

    def __init__(
        self,
        answers: Mapping[str | None, Answer | Sequence[Answer]] | None = None,
        chat_template_name: str = "default",
    ) -> None:
        self._answers = _checked(answers)
        self.loop = LoopThread()
        self.calls: list[Call] = []
        self._turns: dict[str | None, int] = {}
        self._template = named_template(chat_template_name)
        self._seen, self._asked = Prefixes(), Prefixes()

    async def template(self) -> RoleTemplate:
        return self._template

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        num = sampling.n or 1
        self._note("generate", prompt, sampling)
        rules = rules_of(sampling, prompt.text)
        answers = [_ended(self._answer(prompt), prompt, sampling, rules) for _ in range(num)]
        texts = [answer.text for answer in answers]
        usage = self._usage(prompt.text, sum(map(len, texts)), *texts)
        metas = [_meta(usage, answer) for answer in answers]
        one = len(texts) == 1
        return Generation(texts[0] if one else texts, metas[0] if one else metas, usage)

    async def generate_stream(
        self, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Generation, None]:
        """Word by word."""
        whole = await self.generate(prompt, sampling)
        words = re.findall(r"\s*\S+|\s+$", whole.text) or [""]
        for number, word in enumerate(words, 1):
            last = number == len(words)
            yield Generation(word, whole.meta, whole.usage if last else Usage())

    async def select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesMethod
    ) -> Selection:
        self._note("select", prompt, choices=tuple(choices))
        check_greedy(temperature)
        check_prompt(prompt.text)
        chosen = self._answer(prompt) if prompt.name in self._answers else choices[0]
        if chosen not in choices:
            raise BackendError(f"the script chooses {chosen!r}, which is not among {choices}")
        usage = self._usage(prompt.text, 0, *choices)
        decision = ChoicesDecision(chosen, {"method": method.name})
        return Selection(decision, usage, len(prompt.text))

    async def commit(self, prompt: Prompt) -> Committed:
        self._note("commit", prompt)
        return Committed(self._usage(prompt.text, 0), len(prompt.text))

    def get_model_name(self) -> str:
        return "test"

    def flush_cache(self) -> bool:
        self._seen.clear()
        return True

    def get_server_info(self) -> dict[str, Any]:
        return {"model_path": "test"}

    def shutdown(self) -> None:
        self.loop.close()

    def _note(
        self,
        kind: str,
        prompt: Prompt,
        sampling: Sampling | None = None,
        choices: tuple[str, ...] = (),
    ) -> None:
        kept = self._asked.add(prompt.text)
        self.calls.append(Call(kind, prompt.name, kept, sampling, choices))

    def _answer(self, prompt: Prompt) -> str:
        if prompt.name not in self._answers:
            raise BackendError(f"the script has no answer for {prompt.name!r}")
        answer = self._answers[prompt.name]
        if isinstance(answer, Sequence) and not isinstance(answer, str):
            turn = self._turns.get(prompt.name, 0)
            self._turns[prompt.name] = turn + 1
            if turn >= len(answer):
                raise BackendError(f"the script has only {turn} answers for {prompt.name!r}")
            answer = answer[turn]
        if isinstance(answer, Exception):
            raise answer
        text = answer if isinstance(answer, str) else answer(prompt.text)
        if not isinstance(text, str):
            raise BackendError(f"the script's {prompt.name} must give a text, got {text!r}")
        return text

    def _usage(self, text: str, generated: int, *more: str) -> Usage:
        # the last one's logits are always needed
        cached = min(self._seen.longest(text), max(len(text) - 1, 0))
        for one in more or ("",):
            self._seen.add(text + one)
        return Usage(len(text), cached, generated, 1)


def _checked(answers: Any) -> dict[str | None, Answer | Sequence[Answer]]:
    """Raises ExpressionError."""
    if not isinstance(answers, Mapping | None):
        raise ExpressionError(
            f"TestBackend: answers must be a dict from variables to answers, got {answers!r}."
        )
    for name, answer in (answers or {}).items():
        for one in answer if isinstance(answer, list | tuple) else (answer,):
            if not isinstance(one, str | Exception) and not callable(one):
                raise ExpressionError(
                    f"TestBackend: the answer for {name!r} must be a text, an exception, a "
                    f"function of the text so far, or a list of these, got {answer!r}."
                )
    return dict(answers or {})


def _ended(text: str, prompt: Prompt, sampling: Sampling, rules: Rules) -> Ended:
    """The answer as an engine would end it. Raises BackendError where none could give it."""
    answer = rules.ended(text)
    if answer is None:
        why = f"does not match its {sampling.constraint}"
        raise BackendError(f"the script's {prompt.name}, {text!r}, {why}")
    return answer


def _meta(usage: Usage, answer: Ended) -> dict[str, Any]:
    return {
        "finish_reason": answer.reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": len(answer.text),
    }
