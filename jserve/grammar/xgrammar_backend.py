"""Grammars by xgrammar: compiled automata that fill a mask in microseconds.

Imported only by a process that compiles or masks, because xgrammar imports torch.
"""

from __future__ import annotations

import numpy as np
import torch
import xgrammar

from jserve.grammar.backend import GrammarError, Vocabulary
from jserve.grammar.ebnf_check import check_ebnf
from jserve.grammar.json_text import read_json
from jserve.grammar.library_words import TOO_DEEP, plain_words
from jserve.grammar.places import too_deep
from jserve.grammar.regex_syntax import whole_match
from jserve.grammar.tag_check import check_tag_schema, parse_tag
from jserve.types import GrammarSpec


class XGrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._words = vocabulary.words
        padding = vocabulary.size - len(vocabulary.tokens)
        self._info = xgrammar.TokenizerInfo(
            [*vocabulary.tokens, *[b""] * padding],
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )

    def prepare(self, kind: str) -> None:
        pass  # all is there

    def compile(self, spec: GrammarSpec) -> bytes:
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            if spec.kind == "regex":
                compiled = compiler.compile_regex(whole_match(spec.text))
            elif spec.kind == "ebnf":
                written = check_ebnf(spec.text)
                xgrammar.Grammar.from_ebnf(spec.text)  # its errors have the caller's columns
                compiled = compiler.compile_grammar(written)
            elif spec.kind == "structural_tag":
                compiled = compiler.compile_structural_tag(parse_tag(spec.text))
            else:
                schema = check_tag_schema(read_json(spec.text, "schema"), "#")
                compiled = compiler.compile_json_schema(schema, max_whitespace_cnt=2)
            self._check_begins(compiled)
            return compiled.serialize_json().encode()
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            if spec.kind == "structural_tag" and TOO_DEEP.search(str(error)):
                raise too_deep(spec.text) from None
            raise GrammarError(_reason(error)) from None

    def _check_begins(self, compiled: xgrammar.CompiledGrammar) -> None:
        row = np.zeros((1, self._words), np.int32)
        matcher = xgrammar.GrammarMatcher(compiled)
        if matcher.fill_next_token_bitmask(torch.from_numpy(row), 0) and not row.any():
            raise GrammarError("no text can satisfy it: no token can begin it")

    def load(self, payload: bytes) -> XGrammarTemplate:
        compiled = xgrammar.CompiledGrammar.deserialize_json(payload.decode(), self._info)
        return XGrammarTemplate(compiled, self._words)


class XGrammarTemplate:
    def __init__(self, compiled: xgrammar.CompiledGrammar, words: int) -> None:
        self._compiled = compiled
        self._words = words

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._words)


class XGrammarMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    @property
    def finished(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def fill(self, row: np.ndarray) -> None:
        assert row.shape == (self._words,), f"{row.shape=} {self._words=}"
        self._matcher.fill_next_token_bitmask(torch.from_numpy(row[None]), 0)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced(self) -> bytes:
        return self._matcher.find_jump_forward_string().encode()


def _reason(error: Exception) -> str:
    """The library's message without its file names and line numbers."""
    text = str(error).strip()
    if text.startswith("[") and "] " in text:  # a time stamp and the place in its source
        text = text.split("] ", 1)[1].split(": ", 1)[-1]
    return plain_words(text)
