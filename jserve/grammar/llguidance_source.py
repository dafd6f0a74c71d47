"""Specs in Lark, as llguidance reads it, and what of them it may find too costly to follow.

Raises GrammarError for what would not be enforced; runs nothing of the library.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.ebnf_check import check_ends
from jserve.grammar.gbnf import parse_gbnf
from jserve.grammar.lark import to_lark
from jserve.grammar.regex_counts import num_places
from jserve.grammar.regex_parser import Parser
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
_MANY_PLACES = 200  # a pattern of fewer has been within all limits, however it was nested
_COUNT = re.compile(r"(?<!\\u)\{\d")
_TEXT_KEYWORDS = ("pattern", "minLength", "maxLength")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """`costly`: grammars to try, each for the patterns at one place ("": all of it is one);
    `schemas`: those in it, by their places."""

    text: str
    costly: tuple[tuple[str, str], ...] = ()
    schemas: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def source_of(spec: GrammarSpec) -> Source:
    return _WRITERS[spec.kind](spec.text)


def schema_alone(schema: Mapping[str, Any]) -> str:
    """One that was checked, as a grammar."""
    return _whole(f"start: %json {_with(schema, _JSON_OPTIONS)}")


def _whole(text: str) -> str:
    # Where it takes a text to be forced, only one of its tokenizations would be allowed.
    return f'%llguidance {{"no_forcing": true}}\n{text}\n'


def _regex(text: str) -> Source:
    plain = whole_match(text)
    whole = _whole(f"start: /{plain or '(?:)'}/")
    return Source(whole, (("", whole),) if _has_many_places(plain) else ())


def _ebnf(text: str) -> Source:
    rules = parse_gbnf(text)
    check_ends(rules)
    whole = _whole(to_lark(rules))
    many = any(num_places(node) >= _MANY_PLACES for node in rules.values())  # type: ignore[arg-type]
    return Source(whole, (("", whole),) if many else ())


def _json(text: str) -> Source:
    written, checked, costly = _schema(text, "#")
    return Source(_whole(f"start: %json {written}"), costly, (("#", checked),))


def _structural_tag(text: str) -> Source:
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
    triggers = list(dict.fromkeys(trigger for trigger, *_ in tag["tags"]))
    names = " | ".join(f"tag_{i}" for i in range(len(tag["tags"])))
    lines = [f"start: ({names})* FREE", *_free_text(triggers)]
    costly: list[tuple[str, str]] = []
    schemas: list[tuple[str, Mapping[str, Any]]] = []
    for i, (trigger, begin, schema, end) in enumerate(tag["tags"]):
        rest, last = (_quote(part) for part in (begin[len(trigger) :], end))
        at = f"#/structures/{i}/schema"
        written, checked, more = _schema(json.dumps(schema), at)
        costly += more
        schemas.append((at, checked))
        lines.append(f"tag_{i}: HEAD_{triggers.index(trigger)} {rest} %json {written} {last}")
    return Source(_whole("\n".join(lines)), tuple(costly), tuple(schemas))


def _free_text(triggers: Sequence[str]) -> Iterator[str]:
    """FREE has no trigger in it; HEAD_i is free text and the trigger that ends it. Said by sets,
    because a lazy terminal of one byte is not seen to end right behind a number."""
    quoted = [_quote(trigger) for trigger in triggers]
    yield f"TRIGGER: {' | '.join(quoted)}"
    yield r"ANY: /(.|\n)*/"
    yield r"SOME: /(.|\n)+/"
    yield "FREE: ANY & ~(ANY TRIGGER ANY)"
    for i, trigger in enumerate(quoted):
        yield f"HEAD_{i}: (ANY {trigger}) & ~(ANY TRIGGER SOME)"


_WRITERS = {"regex": _regex, "ebnf": _ebnf, "json": _json, "structural_tag": _structural_tag}


def _schema(text: str, at: str) -> tuple[str, Mapping[str, Any], tuple[tuple[str, str], ...]]:
    """A JSON schema with our options in it, without, and what is costly of it."""
    checked = check_schema(text, at)
    escapes = 'bfnrt\\"' if checked.plain_keys else 'bfnrtu\\"'
    options = _JSON_OPTIONS | {"json_allowed_escapes": escapes}
    costly = []
    for place, node in checked.patterns:
        if _has_many_places(node["pattern"]):
            kept = {keyword: node[keyword] for keyword in _TEXT_KEYWORDS if keyword in node}
            costly.append(
                (place, _whole(f"start: %json {_with({'type': 'string', **kept}, options)}"))
            )
    return _with(checked.schema, options), checked.schema, tuple(costly)


def _with(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _has_many_places(plain: str) -> bool:
    return bool(_COUNT.search(plain)) and num_places(Parser(plain).parse()) >= _MANY_PLACES


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
