"""What callers ask for → one GrammarSpec."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jserve.grammar.backend import GrammarError
from jserve.grammar.regex_syntax import escape
from jserve.types import GrammarSpec

#: OpenAI's response_format json_object.
JSON_OBJECT = GrammarSpec(kind="json", text='{"type":"object"}')


def spec_of(
    *,
    json_schema: str | None = None,
    regex: str | None = None,
    ebnf: str | None = None,
    structural_tag: str | None = None,
) -> GrammarSpec | None:
    """The one that is given and not empty. Raises GrammarError for several."""
    given = {
        "json": json_schema,
        "regex": regex,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
    }
    specs = [GrammarSpec(kind=kind, text=text) for kind, text in given.items() if text]
    if len(specs) > 1:
        raise GrammarError("at most one of json_schema, regex, ebnf and structural_tag is possible")
    if not specs:
        return None
    if specs[0].text == "$$ANY$$" and specs[0].kind == "json":  # SGLang's any JSON value
        return GrammarSpec(kind="json", text="{}")
    return specs[0]


def choice_spec(choices: Sequence[str]) -> GrammarSpec:
    """One of these texts and nothing else. Raises GrammarError."""
    texts = list(dict.fromkeys(choices))
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise GrammarError(f"choices must be texts that are not empty: {json.dumps(texts)[:200]}")
    return GrammarSpec(kind="regex", text="|".join(map(escape, texts)))
