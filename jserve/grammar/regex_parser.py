"""The text of a regular expression → its tree.

What no automaton can decide (lookaround, backreferences, word boundaries) and what ECMA-262 and
Python read differently is refused by name, with its position.
"""

from __future__ import annotations

import sys

from jserve.grammar.backend import GrammarError
from jserve.grammar.regex_sets import ALL, ESCAPED, LINE_ENDS, Range, category, complement, union
from jserve.grammar.regex_tree import Alt, Anchor, Chars, Node, Repeat, Seq, first_anchor

_MAX_DEPTH = 100  # groups in groups
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_REFUSED_GROUPS = {
    **{"=": "lookahead", "!": "lookahead", "<=": "lookbehind", "<!": "lookbehind"},
    **{">": "an atomic group", "P=": "a backreference", "P>": "a recursion", "R": "a recursion"},
    **{"(": "a condition", "|": "a branch reset", "#": "a comment", "&": "a recursion"},
}


class Parser:
    """Reads one text. `ecma`: what only Python writes is refused."""

    def __init__(self, text: str, ecma: bool = False) -> None:
        self._text, self._ecma = text, ecma
        self._at = 0
        self._depth = 0
        self._ignore_case = self._dot_all = False

    def parse(self) -> Node:
        if self._text.startswith("(?") and self._text[2:3] in tuple("ims"):
            self._flags()
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a ) without its (")
        return node

    def _flags(self) -> None:
        end = self._text.find(")")
        flags = self._text[2:end]
        if self._ecma:
            raise self._error(f"the flags (?{flags}), which ECMA-262 does not have,")
        if end < 0 or set(flags) - set("is"):
            raise self._error(f"the flags (?{flags}) (only i and s, at the start)")
        self._ignore_case, self._dot_all = "i" in flags, "s" in flags
        self._at = end + 1

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            items.append(self._quantified())
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _quantified(self) -> Node:
        start = self._at
        node = self._atom()
        count = self._quantifier()
        if count is None:
            return node
        if first_anchor(node) is not None:
            raise self._error("a repeated anchor", start)
        if self._take("+"):
            raise self._error("a possessive quantifier", self._at - 1)
        self._take("?")  # which match is preferred makes no difference here
        start = self._at
        if self._quantifier() is not None:
            raise self._error("nothing to repeat", start)
        return Repeat(node, *count)

    def _quantifier(self) -> tuple[int, int | None] | None:
        start = self._at
        for sign, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return count
        if not self._take("{"):
            return None
        least = self._number()
        most = least
        if self._take(","):
            most = self._number()
            if least is None:
                raise self._error("{,n}, which dialects read differently,", start)
            most = None if most is None else most
        if least is None or not self._take("}"):
            self._at = start  # an ordinary brace
            return None
        if most is not None and most < least:
            raise self._error(f"a count from {least} to {most}", start)
        return least, most

    def _number(self) -> int | None:
        start = self._at
        while self._text[self._at : self._at + 1] in tuple("0123456789"):
            self._at += 1
        digits = self._text[start : self._at]
        if len(digits) > 6:
            raise self._error(f"a count of {digits[:20]}", start)
        return int(digits) if digits else None

    def _atom(self) -> Node:
        start, char = self._at, self._next()
        if char == "(":
            return self._group(start)
        if char == "[":
            return self._class(start)
        if char in "^$":
            return Anchor(char, start)
        if char == ".":
            return Chars(ALL if self._dot_all else complement(LINE_ENDS))
        if char == "\\":
            return Chars(self._escape(start))
        if char in "*+?":
            raise self._error("nothing to repeat", start)
        return Chars(self._fold([(ord(char), ord(char))], start))

    def _group(self, start: int) -> Node:
        if self._take("?"):
            rest = self._text[self._at :]
            name = next((n for n in ("<=", "<!", *_REFUSED_GROUPS) if rest.startswith(n)), None)
            if name is not None:
                raise self._error(_REFUSED_GROUPS[name], start)
            if self._ecma and rest.startswith("P<"):
                raise self._error("a group (?P<…>), which ECMA-262 writes (?<…>),", start)
            if self._take("<") or self._take("P<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    raise self._error("a group without a proper name", start)
                self._at = end + 1
            elif not self._take(":"):
                raise self._error(f"the group (?{rest[:1]}", start)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} groups in each other", start)
        node = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("a ( without its )", start)
        return node

    def _class(self, start: int) -> Chars:
        negated = self._take("^")
        if self._text[self._at : self._at + 1] == "]":
            raise self._error("[] or [^], which dialects read differently,", start)
        ranges: list[Range] = []
        while not self._take("]"):
            if self._text.startswith(("[:", "[.", "[="), self._at):
                raise self._error("a POSIX class", self._at)
            low = self._member(start)
            if self._text[self._at : self._at + 1] == "-" and self._single(low):
                at = self._at
                self._at += 1
                if self._text[self._at : self._at + 1] != "]":
                    high = self._member(start)
                    if self._single(high):
                        if high[0][0] < low[0][0]:
                            raise self._error("a range that goes backwards", at)
                        low = ((low[0][0], high[0][0]),)
                    else:
                        low = (*low, (0x2D, 0x2D), *high)
                else:
                    low = (*low, (0x2D, 0x2D))
            ranges += low
        found = self._fold(ranges, start)
        found = complement(found) if negated else found
        if not found:
            raise self._error("a set of nothing", start)
        return Chars(found)

    def _member(self, start: int) -> tuple[Range, ...]:
        at, char = self._at, self._next("a [ without its ]", start)
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self._take("b"):
            return ((8, 8),)
        return self._escape(at, fold=False)

    @staticmethod
    def _single(ranges: tuple[Range, ...]) -> bool:
        return len(ranges) == 1 and ranges[0][0] == ranges[0][1]

    def _escape(self, start: int, fold: bool = True) -> tuple[Range, ...]:
        char = self._next("a \\ at the end")
        if char.lower() in ESCAPED:
            found = ESCAPED[char.lower()]
            return found if char.islower() else complement(found)
        if char in _CONTROLS:
            return ((_CONTROLS[char], _CONTROLS[char]),)
        if char in "pP":
            found = self._category(start)
            return found if char == "p" else complement(found)
        if char in "bB":
            raise self._error("a word boundary", start)
        if char in "k123456789":
            raise self._error("a backreference", start)
        if char == "0" and self._text[self._at : self._at + 1] not in tuple("0123456789"):
            code = 0
        elif char in "xuc":
            code = self._code(char, start)
        elif char.isascii() and char.isalnum():
            raise self._error(f"the escape \\{char}", start)
        else:
            code = ord(char)
        return self._fold([(code, code)], start) if fold else ((code, code),)

    def _code(self, kind: str, start: int) -> int:
        if kind == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c without a letter", start)
            return ord(letter) % 32
        if self._text.startswith("{", self._at) and kind == "x":
            raise self._error("\\x{…}, which dialects read differently (write \\u{…}),", start)
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : end] if end >= 0 else ""
            self._at = end + 1
        else:
            digits = self._text[self._at : self._at + (2 if kind == "x" else 4)]
            self._at += len(digits)
            if len(digits) < (2 if kind == "x" else 4):
                digits = ""
        if not digits or set(digits) - set("0123456789abcdefABCDEF"):
            raise self._error(f"\\{kind} without its digits", start)
        code = int(digits, 16)
        if kind == "u" and 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at):
            low = self._text[self._at + 2 : self._at + 6]
            if len(low) == 4 and low[:2].lower() in ("dc", "dd", "de", "df"):
                self._at += 6
                code = 0x10000 + ((code - 0xD800) << 10) + (int(low, 16) - 0xDC00)
        if code > sys.maxunicode or 0xD800 <= code < 0xE000:
            raise self._error(f"the code point {code:x}", start)
        return code

    def _category(self, start: int) -> tuple[Range, ...]:
        end = self._text.find("}", self._at)
        if not self._take("{") or end < 0:
            raise self._error("\\p without a name in braces", start)
        name = self._text[self._at : end]
        self._at = end + 1
        found = category(name)
        if not found:
            raise self._error(f"the property \\p{{{name[:40]}}}", start)
        return found

    def _fold(self, ranges: list[Range], start: int) -> tuple[Range, ...]:
        """The ranges in order; with the flag i in both cases."""
        if self._ignore_case:
            if any(high > 0x7F for _, high in ranges):
                raise self._error("a letter beyond ASCII together with the flag i", start)
            for low, high in tuple(ranges):
                for first, shift in ((0x41, 32), (0x61, -32)):
                    left, right = max(low, first), min(high, first + 25)
                    if left <= right:
                        ranges.append((left + shift, right + shift))
        return union(ranges)

    def _next(self, missing: str = "an unexpected end", start: int | None = None) -> str:
        if self._at >= len(self._text):
            raise self._error(missing, start)
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _error(self, what: str, at: int | None = None) -> GrammarError:
        position = self._at if at is None else at
        return GrammarError(f"the regular expression has {what} at position {position}")
