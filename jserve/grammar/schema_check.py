"""JSON schemas: what a backend enforces of them, and refusals of all else by name and place.

`check_schema` hands back an equivalent schema in the forms that llguidance has right: numbers and
patterns in one way of writing, keywords that say nothing left out. Nothing is loosened: a keyword
that would be ignored, or enforced wrongly, is a GrammarError with its JSON pointer. The tables come
from measuring (docs/grammar-conformance.md); llguidance refuses the rest when it compiles.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.formats import FORMAT_PATTERNS, INTEGER_FORMATS, NATIVE_FORMATS
from jserve.grammar.json_text import read_json
from jserve.grammar.places import escape, placed
from jserve.grammar.regex_parser import Parser
from jserve.grammar.regex_syntax import search_match
from jserve.grammar.regex_texts import few_texts
from jserve.grammar.schema_depth import check_depth
from jserve.grammar.schema_ends import check_ends
from jserve.grammar.schema_refs import SchemaRefs
from jserve.grammar.schema_shapes import check_shapes

#: Keywords of any draft that restrict an instance; what is in no table is an annotation.
_ENFORCED = frozenset(
    {
        *("$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const", "format"),
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "items", "prefixItems", "additionalItems"),
        *("minItems", "maxItems", "minLength", "maxLength", "pattern", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_NOT_ENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "disallow", "extends", "divisibleBy"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)
KEYWORDS = _ENFORCED | _NOT_ENFORCED
_MOST_EXACT = 2**53  # of integers: a double holds all up to it
_MOST_PARTED = 1e11  # numbers of 15 digits have some behind the point up to it
_MOST_CHARACTERS, _MOST_COUNTED = 2**32 - 1, 2**63 - 1  # what llguidance holds
_COUNTS = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
#: Keywords whose value is a schema, a list of them, and a mapping to them.
_ONE = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_MOVED_MAPS = ("patternProperties", "dependentSchemas", "dependencies")
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"})

_OLD_DRAFT = re.compile(r"draft-0[3467]/")  # what stands beside $ref is ignored there
_CONTROL = re.compile(r"\\u00[01]|\x7f")

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedSchema:
    """`schema` is for llguidance; `plain_keys`: a declared property may not be written
    with \\u escapes, because it would pass as one that is not declared; `patterns`: the places of
    patterns, with the schemas of strings that have them."""

    schema: Schema
    plain_keys: bool
    patterns: tuple[tuple[str, Schema], ...]


def check_schema(text: str, at: str = "#") -> CheckedSchema:
    """`at` is the place of the schema itself. Raises GrammarError."""
    schema = read_json(text, "schema", at)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        if schema is False:
            raise GrammarError(f"{at} is false, which allows nothing")
        raise GrammarError(f"{at} must be an object, got {json.dumps(schema)[:60]}")
    schema.pop("x-guidance", None)  # would set options of llguidance, lenient ones too
    check = _Check(schema, at)
    check.run()
    return CheckedSchema(schema, check.plain_keys, tuple(check.patterns))


class _Check:
    """Visits every subschema that an instance can meet, and rewrites it in place."""

    def __init__(self, root: Schema, at: str) -> None:
        self._refs = SchemaRefs(root)
        self._refs_stand_alone = bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
        self._open: list[tuple[Any, str]] = [(root, at)]
        self._seen: dict[int, tuple[Schema, str]] = {}
        self._moved: dict[int, str] = {}  # the places of schemas that a rewrite may put elsewhere
        self._escaped: str | None = None  # where a name or a value is that JSON writes with \\u
        self.plain_keys = False
        self.patterns: list[tuple[str, Schema]] = []

    def run(self) -> None:
        while self._open:
            node, at = self._open.pop()
            at = self._moved.get(id(node), at)
            if isinstance(node, dict) and id(node) not in self._seen:
                self._seen[id(node)] = node, at
                self._node(node, at)
            elif not isinstance(node, dict | bool):
                raise GrammarError(f"{at} is no schema: {json.dumps(node)[:50]}")
        if self.plain_keys and self._escaped:
            raise GrammarError(
                f"{self._escaped} has control characters, which needs additionalProperties: false "
                "wherever properties are declared"
            )
        check_ends(list(self._seen.values()), self._refs)
        check_depth(*next(iter(self._seen.values())), self._refs)

    def _node(self, node: Schema, at: str) -> None:
        if self._refs_stand_alone and "$ref" in node:
            for keyword in KEYWORDS & node.keys() - {"$ref"}:
                del node[keyword]
        check_shapes(node, at)
        self._note_places(node, at)
        given = "pattern" in node  # and no format's
        for rewrite in _REWRITES:
            rewrite(node, at)
        self.patterns += [(f"{at}/pattern", node)] if given else []
        names = f"{at}/patternProperties"
        self.patterns += [(names, {"pattern": key}) for key in node.get("patternProperties", ())]
        for keyword in node:
            if keyword in _NOT_ENFORCED:
                raise refused(keyword, at, "cannot be enforced")
        self._note_escapes(node, at)
        if isinstance(node.get("$ref"), str):
            self._open.append(self._refs.find(node, node["$ref"], at))
        for keyword in _ONE:
            if isinstance(node.get(keyword), dict):
                self._open.append((node[keyword], f"{at}/{keyword}"))
        for keyword in _LISTS:
            if isinstance(node.get(keyword), list):
                self._open += [(one, f"{at}/{keyword}/{i}") for i, one in enumerate(node[keyword])]
        for keyword in _MAPS:
            inner = node.get(keyword, {})
            self._open += [(inner[key], f"{at}/{keyword}/{escape(key)}") for key in inner]

    def _note_places(self, node: Schema, at: str) -> None:
        for keyword in node.keys() & {*_MOVED_MAPS, *_UNEVALUATED, "additionalProperties"}:
            value, place = node[keyword], f"{at}/{keyword}"
            named = value.items() if keyword in _MOVED_MAPS else ()
            for one, at_one in [(value, place), *((v, f"{place}/{escape(k)}") for k, v in named)]:
                if isinstance(one, dict):
                    self._moved.setdefault(id(one), at_one)

    def _note_escapes(self, node: Schema, at: str) -> None:
        named = any(node.get(keyword) for keyword in _MAPS)
        self.plain_keys |= named and node.get("additionalProperties") is not False
        fixed = [node[keyword] for keyword in ("const", "enum") if keyword in node]
        if _CONTROL.search(json.dumps([*fixed, *node.get("properties", ())])):
            self._escaped = at


def refused(keyword: str, at: str, why: str) -> GrammarError:
    return GrammarError(f"{keyword} at {at} {why}")


# ---- rewrites: each leaves the set of valid instances as it is


def _drop_idle(node: Schema, at: str) -> None:
    """Keywords that allow everything as they stand."""
    for keyword, idle in _IDLE.items():
        if keyword in node and idle(node):
            del node[keyword]


_IDLE: dict[str, Callable[[Schema], bool]] = {
    "if": lambda node: not {"then", "else", *_UNEVALUATED} & node.keys(),
    "then": lambda node: "if" not in node or node["then"] in (True, {}),
    "else": lambda node: "if" not in node or node["else"] in (True, {}),
    "maxContains": lambda node: "contains" not in node,
    "contains": lambda node: (
        node.get("minContains") == 0 and not {"maxContains", *_UNEVALUATED} & node.keys()
    ),
    "minContains": lambda node: "contains" not in node,
    "not": lambda node: node["not"] is False or node["not"] == {"not": {}},
    "uniqueItems": lambda node: node["uniqueItems"] is False,
    "propertyNames": lambda node: node["propertyNames"] in (True, {}),
    "dependentRequired": lambda node: not any(node["dependentRequired"].values()),
    "unevaluatedItems": lambda node: (
        node["unevaluatedItems"] in (True, {}) or isinstance(node.get("items"), dict | bool)
    ),
    "unevaluatedProperties": lambda node: (
        node["unevaluatedProperties"] in (True, {}) or "additionalProperties" in node
    ),
}


def _settle_unevaluated(node: Schema, at: str) -> None:
    """Without subschemas in place, the unevaluated is the additional."""
    if _IN_PLACE & node.keys():
        return
    if "unevaluatedProperties" in node:
        node["additionalProperties"] = node.pop("unevaluatedProperties")
    if "unevaluatedItems" in node and "contains" not in node:
        rest = node.pop("unevaluatedItems")
        # a list of items has them behind it, where older drafts say nothing else
        node.setdefault("additionalItems" if "items" in node else "items", rest)


def _settle_dependencies(node: Schema, at: str) -> None:
    """A property that is there demands: either it may not be there, or the demand holds."""
    rules = [
        rule
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies")
        for rule in node.pop(keyword, {}).items()
    ]
    demands = [
        {
            "anyOf": [
                {"properties": {name: False}},
                {"properties": {name: True}, "required": demand}
                if isinstance(demand, list)
                else demand,
            ]
        }
        for name, demand in rules
        if demand not in ([], True, {})
    ]
    if demands:
        node["allOf"] = [*node.get("allOf", []), *demands]


def _settle_names(node: Schema, at: str) -> None:
    """propertyNames with a pattern: names that match have the additional properties' schema."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or names.keys() - {"type", "pattern", "$comment"}:
        return
    if names.get("type", "string") != "string" or "pattern" not in names:
        return
    for_all = node.get("patternProperties", {})
    if "properties" in node or not for_all.keys() <= {"", ".*"} or len(for_all) > 1:
        return
    del node["propertyNames"]
    others = node.pop("additionalProperties", True)
    node["patternProperties"] = {names["pattern"]: next(iter(for_all.values()), others)}
    node["additionalProperties"] = False


def _settle_others(node: Schema, at: str) -> None:
    """Side by side, because with another schema between these two llguidance reads the one as if
    the other were not there."""
    if node.keys() >= {"patternProperties", "additionalProperties"}:
        for keyword in ("patternProperties", "additionalProperties"):
            node[keyword] = node.pop(keyword)


def _settle_numbers(node: Schema, at: str) -> None:
    """1.0 is 1, and draft 4's exclusive limits are numbers."""
    for keyword in ("const", "enum"):
        if keyword in node:
            node[keyword] = whole(node[keyword])
            for value in _rounded(node[keyword]):
                raise refused(keyword, at, f"{_short(value)} is more than a double holds exactly")
    for keyword in _COUNTS & node.keys():
        node[keyword] = whole(node[keyword])
        most = _MOST_CHARACTERS if keyword.endswith("Length") else _MOST_COUNTED
        if node[keyword] > most:
            raise refused(keyword, at, f"is above {most}; lower it, or leave it out")
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool):
            on = node.pop(exclusive)
            if on and limit in node:
                node[exclusive] = node.pop(limit)
        for keyword in (exclusive, limit):
            value = node.get(keyword)
            if isinstance(value, int) and not _exact(value):
                raise refused(keyword, at, f"{_short(value)} is more than a double holds exactly")
        if node.get("type") != "integer":
            _include(node, exclusive, limit)


def _include(node: Schema, exclusive: str, limit: str) -> None:
    """In place of a whole exclusive limit that is the nearest to 0 of what is allowed, the next
    number of 15 digits (1e-20 for 0), because with another limit less than 1 away llguidance admits
    the excluded number too."""
    value = node.get(exclusive)
    sign, tighter = (1, max) if limit == "minimum" else (-1, min)
    if not isinstance(value, int | float) or not 0 <= sign * value < _MOST_PARTED:
        return
    if value != int(value):
        return
    nearest = sign * 1e-20
    if value:
        whole_part = str(abs(int(value)))
        nearest = sign * float(f"{whole_part}.{'1':0>{15 - len(whole_part)}}")
    del node[exclusive]
    node[limit] = tighter(node.get(limit, nearest), nearest)


def _exact(value: int) -> bool:
    return abs(value) < 1e308 and int(float(value)) == value


def _short(value: int) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} characters)"


def _rounded(value: Any) -> Iterator[int]:
    """The integers in it that would be written as doubles near them, or with fewer digits."""
    if isinstance(value, int) and abs(value) > _MOST_EXACT:
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _rounded(item)


def whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def _settle_patterns(node: Schema, at: str) -> None:
    """Every pattern in one way of writing, and formats by patterns and limits."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _pattern(node["pattern"], f"{at}/pattern")
    named: dict[str, list[Any]] = {}  # two patterns may be one, written differently
    for key, value in node.get("patternProperties", {}).items():
        named.setdefault(_pattern(key, f"{at}/patternProperties"), []).append(value)
    if named:
        node["patternProperties"] = {
            key: values[0] if len(values) == 1 else {"allOf": values}
            for key, values in named.items()
        }
    name = node.get("format")
    kind = node.get("type")
    if kind == "integer" and name in INTEGER_FORMATS:
        node["allOf"] = [*node.get("allOf", []), dict(INTEGER_FORMATS[node.pop("format")])]
        return
    if name is None or name in NATIVE_FORMATS:
        return
    if name not in FORMAT_PATTERNS:
        raise refused("format", at, f"{json.dumps(name)[:60]} cannot be enforced")
    del node["format"]
    pattern = _pattern(FORMAT_PATTERNS[name], at)
    if "pattern" in node:
        node["allOf"] = [*node.get("allOf", []), {"pattern": FORMAT_PATTERNS[name]}]
    else:
        node["pattern"] = pattern


def _pattern(text: str, at: str) -> str:
    with placed(at):
        return f"^(?:{search_match(text)})$"


def _settle_declared(node: Schema, at: str) -> None:
    """A pattern whose names are all declared allows no others: behind the last of those llguidance
    would wait for one more, which cannot come. It says what these are."""
    patterns, declared = node.get("patternProperties", {}), node.get("properties", {})
    names = declared.keys() | set(node.get("required", ()))
    for pattern in tuple(patterns):
        texts = few_texts(Parser(pattern).parse(), len(names))
        if texts is not None and texts <= names:
            matched = dict.fromkeys(sorted(texts), patterns[pattern])
            more = [name for name in node.get("required", ()) if name in texts - declared.keys()]
            node["properties"] = declared = {**declared, **dict.fromkeys(more, True)}
            node["allOf"] = [*node.get("allOf", []), {"properties": matched}]
            del patterns[pattern]
    if not patterns:
        node.pop("patternProperties", None)


def _check_least_properties(node: Schema, at: str) -> None:
    """An answer can name a property twice, which counts once."""
    least = node.get("minProperties", 0)
    if isinstance(least, int) and least > len(set(node.get("required", ()))) + 1:
        raise refused("minProperties", at, "above the number of required properties and one more")


_REWRITES: tuple[Callable[[Schema, str], None], ...] = (
    *(_drop_idle, _settle_unevaluated, _settle_dependencies, _settle_names),
    *(_settle_others, _settle_numbers, _settle_patterns, _settle_declared),
    _check_least_properties,
)
