"""EBNF (GBNF): refusals of what a backend reads and does not enforce, and other words for what
xgrammar misreads.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from jserve.grammar.backend import GrammarError
from jserve.grammar.gbnf import Item, Ref, check_counts, check_notation, named_in, parse_gbnf
from jserve.grammar.gbnf_characters import rewritten
from jserve.grammar.regex_tree import Alt, Repeat, Seq

_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')
_COUNTED = re.compile(r"\{[\s\d,]*\}")


def check_ebnf(text: str) -> str:
    """The grammar for xgrammar. Raises GrammarError for lookahead, which it takes as a hint only,
    for Lark, and for code points that are no characters."""
    check_notation(text)
    bare = _TEXT.sub(lambda found: " " * len(found[0]), text)
    found = re.search(r"\(\s*=", bare)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise GrammarError(f"lookahead (=…) in line {line} cannot be enforced")
    for counted in _COUNTED.finditer(bare):
        check_counts(text, *counted.span())
    written = _TEXT.sub(_rewritten, text)
    rules: Mapping[str, Item] = {}
    with contextlib.suppress(GrammarError):  # what only xgrammar reads is left to it
        rules = parse_gbnf(text)
    check_ends(rules)
    return written


def _rewritten(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("#") else rewritten(found.string, *found.span())


def check_ends(rules: Mapping[str, Item]) -> None:
    """Raises GrammarError for a rule that an answer can come to, and that no text ends."""
    reached, open_ = set[str](), {"root"} & rules.keys()
    while open_:
        reached |= open_
        open_ = set().union(*(named_in(rules[name]) for name in open_)) - reached
    ending = set[str]()
    while more := {n for n in rules.keys() - ending if _has_end(rules[n], ending)}:
        ending |= more
    for name in rules:
        if name in reached - ending:
            raise GrammarError(
                f"no text can satisfy the rule {name}: it leads back to itself without an end"
            )


def _has_end(node: Item, ending: set[str]) -> bool:
    match node:
        case Ref(name):
            return name in ending
        case Seq(items):
            return all(_has_end(item, ending) for item in items)
        case Alt(options):
            return any(_has_end(option, ending) for option in options)
        case Repeat(item, least):
            return least == 0 or _has_end(item, ending)
    return True
