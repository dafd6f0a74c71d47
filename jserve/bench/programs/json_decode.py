"""JSON decoding: facts of a text as JSON, field by field and then whole by a schema."""

from __future__ import annotations

import json
from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.passages import PLACES, Place
from jserve.bench.programs.work import Work

EXAMPLES = 6
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "country": {"type": "string", "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "large": {"type": "boolean"},
    },
    "required": ["name", "country", "population", "large"],
    "additionalProperties": False,
}
_INTRODUCTION = (
    "Facts are taken from a text and written as JSON, one object for each text. The name and the "
    "country stand in the text as they are written, the population is a number without blanks, and "
    "large is true for a place of more than 300000 people.\n\n"
)


@sgl.function
def extract(s: sgl.ProgramState, text: str, scale: int = 1) -> dict[str, Any]:
    s += _INTRODUCTION
    for place in PLACES[:EXAMPLES] * scale:
        s += f"Text: {place.text}\nFacts: {_facts(place)}\n\n"
    s += "Text: " + text + "\nCountry in one word:"
    s += sgl.gen("country", regex=r" [A-Z][a-z]{2,12}\n", max_tokens=8)
    s += "Population:" + sgl.gen("population", regex=r" [1-9][0-9]{3,6}\n", max_tokens=10)
    s += "Facts: " + sgl.gen("facts", json_schema=SCHEMA, max_tokens=80)
    return json.loads(s["facts"])


def _facts(place: Place) -> str:
    facts = {"name": place.name, "country": place.country, "population": place.population}
    return json.dumps({**facts, "large": place.population > 300000})


def _answer(state: Any) -> str:
    return f"{state['country'].strip()} {state['population'].strip()} {state['facts']}"


WORK = Work(
    "json",
    "facts of a text by two regexes and a schema, behind six examples",
    extract,
    [{"text": place.text} for place in PLACES[EXAMPLES:]],
    _answer,
    needs_grammar=True,
)
