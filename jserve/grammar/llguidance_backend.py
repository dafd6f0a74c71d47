"""Grammars by llguidance: parsed as they are used, so that compilation is checking.

Its payload is the grammar's own source in llguidance's form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from jserve.grammar.backend import GrammarError, Vocabulary
from jserve.grammar.blame import blamed
from jserve.grammar.contradictions import refuse_contradiction
from jserve.grammar.library_words import TOO_DEEP, plain_words
from jserve.grammar.llguidance_source import Source, schema_alone, source_of
from jserve.grammar.places import too_deep
from jserve.types import GrammarSpec

#: Of what its lexer may build for one mask: 50 ms and less were measured for a million. Patterns
#: are tried with half of what answers have, which take other ways through them.
_FUEL = 2_000_000
_LIMITS = LLParserLimits(step_lexer_fuel=_FUEL)
_TRIAL_LIMITS = LLParserLimits(step_lexer_fuel=_FUEL // 2)
_TRIALS, _TRIAL_TOKENS = 2, 64
#: How lark.py begins EBNF with recursion, in which the library may look for forced text for ever.
_RECURSION = "\nstart: r"
_CONTRADICTION = "Unsatisfiable schema: "


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._words = vocabulary.words
        self._single_bytes = {i for i, one in enumerate(vocabulary.tokens) if len(one) == 1}
        self._tokens = _Tokens(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self._tokens),  # type: ignore[arg-type]
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_ids),
        )

    def prepare(self, kind: str) -> None:
        pass  # all is there

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            source = source_of(spec)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _refusal(str(error), spec) from None
        message = self._message(source.text)
        if message:
            for at, schema in source.schemas if _CONTRADICTION in message else ():
                refuse_contradiction(schema, at, self._contradiction)
            raise self._refusal(message, spec, source)
        message = self._tried(source.text)
        if message:
            raise self._refusal(message, spec, source)
        for text, place in {text: place for place, text in source.costly[::-1]}.items():
            for seed in range(_TRIALS):
                self._walk(text, place, np.random.default_rng(seed))
        return source.text.encode()

    def load(self, payload: bytes) -> LLGuidanceTemplate:
        source = payload.decode()
        jumps = _RECURSION not in source
        return LLGuidanceTemplate(lambda: self._matcher(source, _LIMITS), self._words, jumps)

    def _matcher(self, source: str, limits: LLParserLimits) -> LLMatcher:
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def _message(self, source: str) -> str:
        """What is wrong; a warning is something that it would not enforce."""
        _, messages = LLMatcher.validate_grammar_with_warnings(
            source, self._tokenizer, limits=_TRIAL_LIMITS
        )
        return messages[0] if messages else ""

    def _contradiction(self, schema: Mapping[str, Any]) -> str:
        """Why no value meets it, if this is so."""
        _, _, why = self._message(schema_alone(schema)).partition(_CONTRADICTION)
        return plain_words(why)

    def _refusal(self, message: str, spec: GrammarSpec, source: Source) -> GrammarError:
        """With the place in a schema, where the library says no more than what is wrong."""
        if TOO_DEEP.search(message):
            return _refusal(message, spec)
        reason = plain_words(message)
        for at, schema in source.schemas:
            place = blamed(schema, at, reason, self._why)
            if place:
                return GrammarError(f"{place}: {reason}")
        return _refusal(message, spec)

    def _why(self, schema: Mapping[str, Any]) -> str:
        """What is wrong with a schema on its own, in plain words."""
        source = schema_alone(schema)
        return plain_words(self._message(source) or self._tried(source))

    def _tried(self, source: str) -> str:
        """Its limits show when tokens are asked for and taken: one byte of each kind will do."""
        matcher = self._matcher(source, _TRIAL_LIMITS)
        allowed = _allowed(matcher)
        tried = [matcher]
        for token in [int(i) for i in allowed if int(i) in self._single_bytes][:256]:
            tried.append(matcher.deep_copy())
            tried[-1].consume_token(token)
        for matcher in tried:
            if matcher.is_error():
                return matcher.get_error()
        return "" if len(allowed) else "no text can satisfy it: no token can begin it"

    def _walk(self, source: str, place: str, rng: np.random.Generator) -> None:
        """Take tokens as an answer might, rather long ones, and see that its limits hold."""
        matcher = self._matcher(source, _TRIAL_LIMITS)
        for _ in range(_TRIAL_TOKENS):
            allowed = _allowed(matcher)
            error = matcher.get_error()
            if _CONTRADICTION in error:
                return  # what has this pattern need not be there
            if error:
                raise GrammarError(
                    f"{place}: {plain_words(error)}" if place else plain_words(error)
                )
            drawn = allowed[rng.integers(len(allowed), size=4)] if len(allowed) else []
            token = max(map(int, drawn), key=lambda i: len(self._tokens.tokens[i]), default=None)
            if token is None or not self._tokens.tokens[token]:
                return  # it is whole
            matcher.consume_token(token)


class LLGuidanceTemplate:
    """Its matchers share a lexer, which an error of one of them spoils for all: then there is a new
    one. The first mask is the same for all answers, and costs as much as a hundred later ones."""

    def __init__(self, make: Callable[[], LLMatcher], words: int, jumps: bool = True) -> None:
        self._make, self.jumps = make, jumps
        self._root: LLMatcher | None = None
        self.first = np.zeros(words, np.int32)
        matcher = self.root().deep_copy()
        matcher.unsafe_compute_mask_ptr(self.first.ctypes.data, self.first.nbytes)
        assert not matcher.is_error(), matcher.get_error()[:500]

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

    def root(self) -> LLMatcher:
        """What matchers are copies of; not to be changed."""
        if self._root is None:
            self._root = self._make()
        return self._root

    def drop(self, root: LLMatcher) -> None:
        """Its lexer is spoiled."""
        if self._root is root:
            self._root = None


class LLGuidanceMatcher:
    """Where its lexer is spoiled it goes on with a new one, which it brings to where it is."""

    def __init__(self, template: LLGuidanceTemplate) -> None:
        self._template = template
        self._taken: list[int] = []
        self._root = template.root()
        self._matcher = self._root.deep_copy()

    @property
    def finished(self) -> bool:
        # is_stopped() is true in an error state too, where nothing is complete
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> bool:
        # consume_token would put the matcher into an error state for good
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        if not taken and self._spoiled():
            self._renew()
            taken = self._matcher.try_consume_tokens([token_id]) == 1
        if taken:
            self._taken.append(token_id)
        return taken

    def fill(self, row: np.ndarray) -> None:
        """Raises GrammarError where the library's limits let nobody follow the grammar."""
        assert row.dtype == np.int32 and row.flags.c_contiguous, f"{row.dtype=}"
        if not self._taken:
            row[:] = self._template.first
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise self._limit()

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        del self._taken[len(self._taken) - num_tokens :]

    def forced(self) -> bytes:
        return self._matcher.compute_ff_bytes() if self._template.jumps else b""

    def _spoiled(self) -> bool:
        """What the lexer is asked shows it; a token that it does not take may be a wrong one."""
        asked = self._matcher.deep_copy()
        asked.compute_bitmask()
        return asked.is_error()

    def _renew(self) -> None:
        self._template.drop(self._root)
        self._root = self._template.root()
        self._matcher = self._root.deep_copy()
        if self._matcher.try_consume_tokens(self._taken) < len(self._taken):
            raise self._limit()

    def _limit(self) -> GrammarError:
        self._template.drop(self._root)
        why = plain_words(self._matcher.get_error()) or "its lexer reached a limit"
        return GrammarError(f"the grammar cannot be followed from here: {why}")


class _Tokens:
    """A vocabulary as llguidance's TokenizerWrapper wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        padding = vocabulary.size - len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, *[b""] * padding]
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]
        self._ids: dict[bytes, int] = {}
        for i, token in enumerate(self.tokens):
            self._ids.setdefault(token, i)
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """Greedy, longest token first, up to a byte that no token has: llguidance asks for it."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        length = 1
        while data and length:
            lengths = range(min(self._longest, len(data)), 0, -1)
            length = next((n for n in lengths if data[:n] in self._ids), 0)
            if length:
                ids.append(self._ids[data[:length]])
                data = data[length:]
        return ids


def _refusal(message: str, spec: GrammarSpec) -> GrammarError:
    if spec.kind in ("json", "structural_tag") and TOO_DEEP.search(message):
        return too_deep(spec.text)
    return GrammarError(plain_words(message))


def _allowed(matcher: LLMatcher) -> np.ndarray:
    """The ids that may come next."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))
