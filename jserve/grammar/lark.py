"""Rules of gbnf.py in Lark's notation, as llguidance reads it.

Its lexer takes the longest match of a terminal and never less, so that a rule without recursion
becomes one terminal as a whole, and so does each run of such parts in a rule with recursion.
"""

from __future__ import annotations

from collections.abc import Mapping

from jserve.grammar.gbnf import Item, Ref, named_in
from jserve.grammar.regex_syntax import write
from jserve.grammar.regex_tree import Alt, Chars, Repeat, Seq

_NOTHING = '""'


def to_lark(rules: Mapping[str, Item]) -> str:
    """`root` becomes `start`."""
    return _Writer(rules).text()


class _Writer:
    def __init__(self, rules: Mapping[str, Item]) -> None:
        self._rules = rules
        self._plain = _without_recursion(rules)
        numbers = {name: i for i, name in enumerate(rules)}
        self._names = {
            name: f"T{i}" if name in self._plain else f"r{i}" for name, i in numbers.items()
        }
        self._runs: list[str] = []  # terminals of their own

    def text(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, node in self._rules.items():
            body = self._terminal(node) if name in self._plain else self._rule(node)
            lines.append(f"{self._names[name]}: {body}")
        return "\n".join([*lines, *self._runs])

    def _terminal(self, node: Item) -> str:
        """What has no recursion in it."""
        match node:
            case Ref(name):
                return self._names[name]
            case Chars():
                return f"/{write(node)}/"
            case Seq(items):
                if items and all(isinstance(item, Chars) for item in items):
                    return f"/{write(node)}/"
                return " ".join(map(self._terminal_part, items)) or _NOTHING
            case Alt(options):
                return " | ".join(map(self._terminal, options))
            case Repeat(_, _, 0):  # Lark has no {0,0}
                return _NOTHING
            case Repeat(item, least, most):
                return f"({self._terminal(item)}){_count(least, most)}"
        raise AssertionError(f"{node=}")

    def _terminal_part(self, node: Item) -> str:
        text = self._terminal(node)
        return f"({text})" if isinstance(node, Alt) else text

    def _rule(self, node: Item) -> str:
        match node:
            case Ref(name):
                return self._names[name]
            case Seq(items):
                return " ".join(self._parts(items)) or _NOTHING
            case Alt(options):
                return " | ".join(self._rule_part(option) for option in options)
            case Repeat(_, _, 0):
                return _NOTHING
            case Repeat(item, least, most):
                return f"({self._rule(item)}){_count(least, most)}"
        return self._run((node,))

    def _rule_part(self, node: Item) -> str:
        return self._run((node,)) if self._is_plain(node) else self._rule(node)

    def _parts(self, items: tuple[Item, ...]) -> list[str]:
        parts: list[str] = []
        run: list[Item] = []
        for item in items:
            if self._is_plain(item):
                run.append(item)
                continue
            if run:
                parts.append(self._run(tuple(run)))
            run = []
            text = self._rule(item)
            parts.append(f"({text})" if isinstance(item, Alt) else text)
        return [*parts, self._run(tuple(run))] if run else parts

    def _run(self, items: tuple[Item, ...]) -> str:
        """A terminal for a run of items without recursion."""
        if len(items) == 1 and isinstance(items[0], Ref):
            return self._names[items[0].name]
        if not items or items == (Seq(()),):
            return _NOTHING
        name = f"TT{len(self._runs)}"
        whole = items[0] if len(items) == 1 else Seq(items)  # type: ignore[arg-type]
        self._runs.append(f"{name}: {self._terminal(whole)}")
        return name

    def _is_plain(self, node: Item) -> bool:
        return all(name in self._plain for name in named_in(node))


def _without_recursion(rules: Mapping[str, Item]) -> set[str]:
    """The rules that lead neither back to themselves nor to one that does."""
    names = {name: named_in(node) for name, node in rules.items()}
    plain: set[str] = set()
    while more := {name for name in names.keys() - plain if names[name] <= plain}:
        plain |= more
    return plain


def _count(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"
