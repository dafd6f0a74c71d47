"""The grammar backends one by one, without the choice by kind."""

from __future__ import annotations

from jserve.grammar.backend import Backend, Vocabulary
from jserve.grammar.llguidance_backend import LLGuidanceBackend


def pure_backend(name: str, vocabulary: Vocabulary) -> Backend:
    if name == "llguidance":
        return LLGuidanceBackend(vocabulary)
    from jserve.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)
