"""EBNF (GBNF): refusals of what a backend reads and does not enforce."""

from __future__ import annotations

import re

from jserve.grammar.backend import GrammarError
from jserve.grammar.gbnf import check_notation

_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')


def check_ebnf(text: str) -> None:
    """Raises GrammarError for lookahead, which xgrammar takes as a hint only, and for Lark."""
    check_notation(text)
    bare = _TEXT.sub(lambda found: " " * len(found[0]), text)
    found = re.search(r"\(\s*=", bare)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise GrammarError(f"lookahead (=…) in line {line} cannot be enforced")
