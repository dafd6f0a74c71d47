"""Grammars in GBNF, as llama.cpp and xgrammar write it, read into rules of regular expressions'
trees that name each other. What becomes of them is lark.py's.

    root ::= item ("," item)*      # a comment
    item ::= "text" | [^,\\n]{1,20} | .
"""

from __future__ import annotations

import dataclasses
import re

from jserve.grammar.backend import GrammarError
from jserve.grammar.gbnf_characters import codes_of, ranges_of, refusal
from jserve.grammar.regex_sets import ALL
from jserve.grammar.regex_tree import Alt, Chars, Node, Repeat, Seq

_MAX_DEPTH = 100  # groups in groups
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)
    | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|[*+?])
    | (?P<sign>::=|\(=|[().|])
    """,
    re.VERBOSE,
)
_LARK = re.compile(r"^\s*(?:%\w+|[A-Za-z_]\w*\s*:(?!:=))", re.MULTILINE)
_MOST_DIGITS = 6  # of a count, as in regular expressions
_TOO_MANY = re.compile(rf"(?<!\d)\d{{{_MOST_DIGITS + 1},}}")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of that name takes."""

    name: str


Item = Node | Ref


def named_in(node: Item) -> set[str]:
    """The rules that it names."""
    match node:
        case Ref(name):
            return {name}
        case Seq(items) | Alt(items):
            return set().union(*map(named_in, items))
        case Repeat(item):
            return named_in(item)
    return set()


def check_notation(text: str) -> None:
    """Raises GrammarError for the notations of other grammars."""
    found = None if "::=" in text else _LARK.search(text)
    if found is not None:
        line = text.count("\n", 0, found.end()) + 1
        raise GrammarError(
            f"line {line} is in Lark's notation; ebnf takes GBNF, whose rules are written "
            'root ::= "text" [a-z]+'
        )


def check_counts(text: str, start: int, end: int) -> None:
    """Raises GrammarError for a count between these positions that no library could hold."""
    found = _TOO_MANY.search(text, start, end)
    if found is not None:
        what = f"a count of {found[0][:20]}, which has more than {_MOST_DIGITS} digits,"
        raise refusal(text, what, found.start())


def parse_gbnf(text: str) -> dict[str, Item]:
    """Its rules by name; `root` is among them, and so are all that they name. Raises GrammarError
    with the line."""
    check_notation(text)
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, position
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error(f"{text[at : at + 10]!r}, which has no meaning there", at)
            if found.lastgroup != "blank":
                self._tokens.append((found.lastgroup or "", found[0], at))
            at = found.end()
        self._at = self._depth = 0

    def rules(self) -> dict[str, Item]:
        rules: dict[str, Item] = {}
        self._named: dict[str, int] = {}  # and where
        while self._at < len(self._tokens):
            kind, name, at = self._tokens[self._at]
            if kind != "name" or not self._begins_rule():
                raise self._error(f"{name!r} where a rule begins, which is written name ::= …", at)
            if name in rules:
                raise self._error(f"the rule {name} a second time", at)
            self._at += 2
            rules[name] = self._alternatives()
        if "root" not in rules:
            raise GrammarError("there is no rule root, which is the answer: root ::= …")
        for name, at in self._named.items():
            if name not in rules:
                raise self._error(f"{name}, which no rule defines", at)
        return rules

    def _begins_rule(self) -> bool:
        return self._peek() == "name" and self._peek(1) == "::="

    def _peek(self, ahead: int = 0) -> str:
        """The kind of a token, or the sign that it is; "" behind the last."""
        if self._at + ahead >= len(self._tokens):
            return ""
        kind, text, _ = self._tokens[self._at + ahead]
        return text if kind == "sign" else kind

    def _alternatives(self) -> Item:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))  # type: ignore[arg-type]

    def _sequence(self) -> Item:
        items: list[Item] = []
        while self._peek() not in ("", "|", ")") and not self._begins_rule():
            item = self._item()
            while self._peek() == "count":
                item = self._counted(item)
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))  # type: ignore[arg-type]

    def _item(self) -> Item:
        kind, text, at = self._tokens[self._at]
        self._at += 1
        if kind == "text":
            codes = codes_of(self._text, at + 1, at + len(text) - 1)
            return Seq(tuple(Chars(((code, code),)) for code, _ in codes))
        if kind == "set":
            return Chars(ranges_of(self._text, at + 1, at + len(text) - 1))
        if kind == "name":
            self._named.setdefault(text, at)
            return Ref(text)
        if text == ".":
            return Chars(ALL)
        if text == "(=":
            raise self._error("lookahead (=…), which cannot be enforced,", at)
        if text != "(":
            raise self._error(f"{text!r}, which has no meaning there,", at)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} groups in each other", at)
        node = self._alternatives()
        self._depth -= 1
        if self._peek() != ")":
            raise self._error("a ( without its )", at)
        self._at += 1
        return node

    def _counted(self, item: Item) -> Repeat:
        _, text, at = self._tokens[self._at]
        self._at += 1
        least, most = _COUNTS.get(text, (0, None))
        if text.startswith("{"):
            check_counts(self._text, at, at + len(text))
            low, comma, high = (part.strip() for part in text[1:-1].partition(","))
            least = int(low)
            most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise self._error(f"a count from {least} to {most}", at)
        return Repeat(item, least, most)  # type: ignore[arg-type]

    def _error(self, what: str, at: int) -> GrammarError:
        return refusal(self._text, what, at)
