"""Grammars by llguidance: parsed as they are used, so that compilation is checking.

Its payload is the grammar's own source in llguidance's form.
"""

from __future__ import annotations

import json

import llguidance
import numpy as np

from jserve.grammar.backend import GrammarError, Vocabulary
from jserve.grammar.gbnf import parse_gbnf
from jserve.grammar.lark import to_lark
from jserve.grammar.library_words import TOO_DEEP, plain_words
from jserve.grammar.places import too_deep
from jserve.grammar.regex_syntax import whole_match
from jserve.grammar.schema_check import check_schema
from jserve.grammar.tag_check import old_form
from jserve.types import GrammarSpec

#: Between two JSON tokens: compact, spaced and indented texts, and no more blanks than those take.
WHITE_SPACE = r"( |\n[ \t]{0,20})?"

_JSON_OPTIONS = {
    "whitespace_pattern": WHITE_SPACE,
    "lenient": False,
    "coerce_one_of": False,
}


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
            source = _source(spec)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _refusal(str(error), spec) from None
        _, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, self._tokenizer)
        if messages:  # a warning is something that it would not enforce
            raise _refusal(messages[0], spec)
        self._try(source)
        return source.encode()

    def load(self, payload: bytes) -> LLGuidanceTemplate:
        matcher = llguidance.LLMatcher(self._tokenizer, payload.decode(), log_level=0)
        assert not matcher.is_error(), matcher.get_error()[:500]
        return LLGuidanceTemplate(matcher, self._words)

    def _try(self, source: str) -> None:
        """Its limits show when tokens are asked for and taken: one byte of each kind will do."""
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        first = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(first, bitorder="little"))
        tried = [matcher]
        for token in [int(i) for i in allowed if int(i) in self._single_bytes][:256]:
            tried.append(matcher.deep_copy())
            tried[-1].consume_token(token)
        for matcher in tried:
            if matcher.is_error():
                raise GrammarError(plain_words(matcher.get_error()))
        if not len(allowed):
            raise GrammarError("no text can satisfy it: no token can begin it")


class LLGuidanceTemplate:
    """The first mask is the same for all answers, and costs as much as a hundred later ones."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._first = np.zeros(words, np.int32)
        LLGuidanceMatcher(matcher, None).fill(self._first)

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._first)


class LLGuidanceMatcher:
    """`first`: its mask before any token; None: not known yet."""

    def __init__(self, matcher: llguidance.LLMatcher, first: np.ndarray | None) -> None:
        self._matcher = matcher
        self._first = first

    @property
    def finished(self) -> bool:
        # is_stopped() is true in an error state too, where nothing is complete
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> bool:
        # consume_token would put the matcher into an error state for good
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        if taken:
            self._first = None
        return taken

    def fill(self, row: np.ndarray) -> None:
        assert row.dtype == np.int32 and row.flags.c_contiguous, f"{row.dtype=}"
        if self._first is not None:
            row[:] = self._first
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():  # one of its limits; its mask then allows the end
            row[:] = 0

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced(self) -> bytes:
        return self._matcher.compute_ff_bytes()


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


def _source(spec: GrammarSpec) -> str:
    """The spec in Lark, as llguidance reads it."""
    if spec.kind == "json":
        text = f"start: %json {_schema(spec.text)}"
    elif spec.kind == "regex":
        text = f"start: /{whole_match(spec.text) or '(?:)'}/"
    elif spec.kind == "ebnf":
        text = to_lark(parse_gbnf(spec.text))
    else:
        text = _structural_tag(spec.text)
    # Where it takes a text to be forced, only one of its tokenizations would be allowed.
    return f'%llguidance {{"no_forcing": true}}\n{text}\n'


def _schema(text: str) -> str:
    """A JSON schema with our options in it."""
    checked = check_schema(text)
    escapes = 'bfnrt\\"' if checked.plain_keys else 'bfnrtu\\"'
    options = _JSON_OPTIONS | {"json_allowed_escapes": escapes}
    return json.dumps({**checked.schema, "x-guidance": options}, ensure_ascii=False)


def _structural_tag(text: str) -> str:
    """The old form: free text up to a trigger, which its tag must follow."""
    tag = old_form(text)
    if tag is None:
        raise GrammarError(
            "a structural tag must have structures and triggers here; its other form, with "
            "format, needs a server with --grammar-backend xgrammar"
        )
    if tag["rest"].keys() - {"triggers"}:
        extra = min(tag["rest"].keys() - {"triggers"})
        raise GrammarError(f"#/{extra} needs a server with --grammar-backend xgrammar")
    names = " | ".join(f"tag_{i}" for i in range(len(tag["tags"])))
    lines = [f"start: ({names})* TEXT", r"TEXT: /(.|\n)*/"]
    for i, (trigger, begin, schema, end) in enumerate(tag["tags"]):
        rest, last = (_quote(part) for part in (begin[len(trigger) :], end))
        lines.append(f"head_{i}[lazy]: TEXT {_quote(trigger)}")
        lines.append(f"tag_{i}: head_{i} {rest} %json {_schema(json.dumps(schema))} {last}")
    return "\n".join(lines)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
