"""What an engine refuses of a call, and how it ends which answers: the engine's own checks, stops
and grammars, for a backend that has no engine.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jserve.engine.grammars import FIELDS
from jserve.engine.misfit import no_prompt
from jserve.engine.ranges import check_ranges
from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import RequestError
from jserve.grammar.backend import Backend, GrammarError, Template, Vocabulary
from jserve.grammar.choice import choose_backend, make_backend
from jserve.grammar.spec import spec_of
from jserve.lang.sampling import Sampling
from jserve.tokenizer.stop_regex import check_stop_regexes, text_filter
from jserve.types import GrammarSpec, LogprobParams, SamplingParams

_VOCAB_SIZE = 1 << 31  # of no model: any id will do
_END = 256  # the token behind those of bytes
_OVER = {"type": "stop", "matched": None}


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """An answer without its stop, and the finish_reason."""

    text: str
    reason: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Those of one call. Its tokens are characters."""

    params: SamplingParams
    template: Template | None

    def ended(self, text: str) -> Ended | None:
        """The answer as an engine would end it; None where the grammar allows no such. What a stop
        or max_new_tokens cuts need not be whole."""
        kept, read, stopped = self._cut(text)
        if stopped is not None:
            allowed = self.begins(read) or self.is_whole(kept)
            return Ended(kept, {"type": "stop", "matched": stopped}) if allowed else None
        if self.is_whole(text):
            return Ended(text, dict(_OVER))
        limit = self.params.max_new_tokens
        if limit is not None and len(text) >= limit and self.begins(text):
            return Ended(text, {"type": "length", "length": len(text)})
        cut = (stop for stop in self.params.stop if self.begins(text + stop))  # the script did it
        stopped = next(cut, None)
        return None if stopped is None else Ended(text, {"type": "stop", "matched": stopped})

    def _cut(self, text: str) -> tuple[str, str, str | None]:
        """What is shown, what is read for it, and the stop between the two, if one is found."""
        if self.params.stop or self.params.stop_regex:
            stops, kept = text_filter(self.params), ""
            for count, char in enumerate(text, 1):
                kept += stops.feed(char)
                if stops.stopped is not None:
                    return kept, text[:count], stops.stopped
        return text, text, None

    def begins(self, text: str) -> bool:
        """Whether a whole answer can begin so."""
        if self.template is None:
            return True
        matcher = self.template.fork()
        return all(matcher.accept(byte) for byte in text.encode())

    def is_whole(self, text: str) -> bool:
        if self.template is None:
            return True
        matcher = self.template.fork()
        taken = all(matcher.accept(byte) for byte in text.encode())
        return taken and (matcher.finished or matcher.accept(_END))


def rules_of(sampling: Sampling, prompt: str) -> Rules:
    """The rules of a call, of what `resolved` gave. Raises RequestError naming the field for one
    that an engine would not take."""
    check_prompt(prompt)
    params = sampling_from_dict(sampling.to_native())
    check_ranges(params, _VOCAB_SIZE)
    check_stop_regexes(params.stop_regex)
    _check_logprobs(sampling, len(prompt))
    return syntax_rules(params)


def syntax_rules(params: SamplingParams) -> Rules:
    """Of a call that is right. Raises RequestError for a syntax that cannot be compiled."""
    spec = spec_of(**{name: getattr(params, name) for name in FIELDS.values()})
    if spec is None:
        return Rules(params, None)
    try:
        return Rules(params, _template(spec))
    except GrammarError as error:
        field = params.syntax_field or FIELDS[spec.kind]
        raise RequestError(f"Failed to compile {field} grammar: {error}.", field) from None


def check_prompt(prompt: str) -> None:
    """Raises RequestError, as an engine does whose tokenizer begins no text by itself."""
    if not prompt:
        raise no_prompt("text")


def _check_logprobs(sampling: Sampling, prompt_len: int) -> None:
    for name in ("return_logprob", "return_text_in_logprobs"):
        if not isinstance(value := getattr(sampling, name), bool | None):
            raise RequestError(f"{name} must be true or false, got {value!r}.", name)
    for name in ("logprob_start_len", "top_logprobs_num"):
        value = getattr(sampling, name)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise RequestError(f"{name} must be an integer, got {value!r}.", name)
    start, top = sampling.logprob_start_len, sampling.top_logprobs_num
    wanted = LogprobParams(start_len=-1 if start is None else start, top_num=top or 0)
    wanted.verify(prompt_len, _VOCAB_SIZE)


@functools.lru_cache(256)
def _template(spec: GrammarSpec) -> Template:
    backend = _backend()
    return backend.load(backend.compile(spec))


@functools.cache
def _backend() -> Backend:
    """That of an engine by default. Tokens are bytes."""
    tokens: Sequence[bytes] = [bytes([byte]) for byte in range(_END)]
    return make_backend(choose_backend(None), Vocabulary((*tokens, b""), _END + 1, (_END,)))
