"""Structural tags: one form out of two, and what xgrammar enforces of the schemas within.

The old form (`structures` with `triggers`) becomes the new one (`format`). xgrammar's own compiler
of JSON schemas ignores much and misreads more, so only the forms that it has right pass, by type;
the table comes from measuring (docs/grammar-conformance.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jserve.grammar.backend import GrammarError
from jserve.grammar.ebnf_check import check_ebnf
from jserve.grammar.json_text import read_json
from jserve.grammar.places import escape, find_place, placed
from jserve.grammar.regex_syntax import whole_match
from jserve.grammar.schema_check import KEYWORDS, refused, whole
from jserve.grammar.schema_depth import check_depth
from jserve.grammar.schema_ends import check_ends
from jserve.grammar.schema_refs import SchemaRefs
from jserve.grammar.schema_shapes import check_shapes

#: What may stand beside a `type`, and is enforced then.
_BESIDE_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(),
    "integer": frozenset({"minimum", "maximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
#: Keywords that must stand alone.
_ALONE = ("$ref", "const", "enum", "anyOf")
#: White space between two JSON tokens: enough for ", ", and little to get lost in.
_MAX_WHITE_SPACE = 2

#: The fields of formats, by type, beside that; a tag may leave its type out.
_FORMATS: dict[str, frozenset[str]] = {
    kind: frozenset(fields.split())
    for kind, fields in {
        "const_string": "value",
        "json_schema": "json_schema style any_order max_whitespace_cnt excludes",
        "any_text": "excludes max_tokens max_chars",
        "token": "token",
        "exclude_token": "exclude_tokens",
        "any_tokens": "exclude_tokens max_tokens",
        "grammar": "grammar syntax",
        "regex": "pattern",
        "sequence": "elements",
        "or": "elements",
        "tag": "begin content end",
        "triggered_tags": "triggers tags at_least_one stop_after_first excludes",
        "token_triggered_tags": (
            "trigger_tokens tags exclude_tokens at_least_one stop_after_first"
        ),
        "tags_with_separator": "tags separator at_least_one stop_after_first",
        "optional": "content",
        "plus": "content",
        "star": "content",
        "repeat": "min max content",
        "dispatch": "rules loop excludes",
        "token_dispatch": "rules loop exclude_tokens",
        "qwen_xml_parameter": "json_schema",
    }.items()
}
_COUNTS = frozenset({"min", "max", "max_tokens", "max_chars"})
_MOST = 2**31 - 1
#: … and those of schemas.
_BOUNDS = frozenset({"minimum", "maximum", "minItems", "maxItems"})
_MOST_BOUND = 2**63 - 1
#: … of a whole tag: in the new form, in the old one, and of one structure there.
_TAG = frozenset({"type", "format"})
_OLD = frozenset({"type", "structures", "triggers", "at_least_one", "stop_after_first", "excludes"})
_STRUCTURE = frozenset({"begin", "schema", "end"})

Json = dict[str, Any]


def parse_tag(text: str) -> Json:
    """A structural tag in the new form, its patterns and schemas checked. Raises GrammarError."""
    tag = old_form(text)
    if tag is None:
        tag = read_json(text, "structural tag")
        _refuse_others(tag, _TAG, "#")
    else:
        tags = [
            {
                "begin": begin,
                "content": _json_schema(schema, f"#/structures/{i}/schema"),
                "end": end,
            }
            for i, (_, begin, schema, end) in enumerate(tag["tags"])
        ]
        format = {"type": "triggered_tags", "tags": tags, **tag["rest"]}
        return {"type": "structural_tag", "format": format}
    _visit(tag.get("format"), "#/format")
    return tag


def _json_schema(schema: Any, at: str) -> Json:
    """As the content of a tag."""
    checked = check_tag_schema(schema, at)
    kind = {"type": "json_schema", "json_schema": checked}
    return kind | {"max_whitespace_cnt": _MAX_WHITE_SPACE}


def old_form(text: str) -> Json | None:
    """The old form as {tags: [(trigger, begin, schema, end)], rest}; None for the new form."""
    tag = read_json(text, "structural tag")
    if not isinstance(tag, dict):
        raise GrammarError("a structural tag must be a JSON object")
    if "structures" not in tag:
        return None
    _refuse_others(tag, _OLD, "#")
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("#/triggers must be a list of texts")
    tags, structures = [], tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise GrammarError("#/structures must be a list of objects with begin, schema and end")
    for i, one in enumerate(structures):
        _refuse_others(one, _STRUCTURE, f"#/structures/{i}")
        begin, end = one.get("begin"), one.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(f"#/structures/{i} needs the texts begin and end")
        found = [t for t in triggers if begin.startswith(t)]
        if not found:
            raise GrammarError(f"#/structures/{i}/begin starts with none of the triggers")
        tags.append((found[0], begin, one.get("schema", {}), end))
    if not tags:
        raise GrammarError("#/structures is empty")
    _check_triggers(triggers, [begin for _, begin, _, _ in tags], "#/triggers")
    rest = {key: tag[key] for key in tag if key not in ("structures", "type")}
    return {"tags": tags, "rest": rest}


def _check_triggers(triggers: list[str], begins: list[str], at: str) -> None:
    """Raises GrammarError for a trigger that text could not hold, or not go on behind."""
    for i, trigger in enumerate(triggers):
        if not any(begin.startswith(trigger) for begin in begins):
            raise GrammarError(f"{at}/{i} begins none of the tags; leave it out")
        for other in triggers:
            if other in trigger[:-1]:
                shown = json.dumps(other, ensure_ascii=False)[:60]
                raise GrammarError(f"{at}/{i} holds the trigger {shown}, which ends before it")


def _visit(node: Any, at: str) -> None:
    """Check every schema and pattern under a format; both are rewritten in place."""
    if isinstance(node, list):
        for i, one in enumerate(node):
            _visit(one, f"{at}/{i}")
    if not isinstance(node, dict):
        return
    kind = node.get("type", "tag" if "begin" in node else None)
    if isinstance(kind, str) and kind in _FORMATS:
        _refuse_others(node, _FORMATS[kind] | {"type"}, at)
        _check_counts(node, at)
    if kind == "json_schema":
        if node.get("style", "json") != "json" or node.get("any_order") or node.get("excludes"):
            raise GrammarError(f"{at}: style, any_order and excludes cannot be enforced")
        node.setdefault("max_whitespace_cnt", _MAX_WHITE_SPACE)
        node["json_schema"] = check_tag_schema(node.get("json_schema", {}), f"{at}/json_schema")
    elif kind == "qwen_xml_parameter":
        _check_parameters(node, f"{at}/json_schema")
    elif kind == "regex" and isinstance(node.get("pattern"), str):
        with placed(f"{at}/pattern"):
            node["pattern"] = whole_match(node["pattern"])
    elif kind == "grammar" and isinstance(node.get("grammar"), str):
        if node.get("syntax", "ebnf") != "ebnf":
            raise refused("syntax", at, "must be ebnf; no other one can be enforced")
        with placed(f"{at}/grammar"):
            node["grammar"] = check_ebnf(node["grammar"])
    else:
        if kind == "triggered_tags":
            _check_triggered(node, at)
        for key, inner in node.items():
            _visit(inner, f"{at}/{escape(key)}")


def _check_parameters(node: Json, at: str) -> None:
    """Of a tag whose properties are elements: the values of these are schemas as elsewhere."""
    schema = check_tag_schema(node.get("json_schema"), at)
    if schema.get("type") not in ("object", ["object"]):
        raise refused("type", at, 'must be "object", whose properties are the parameters')


def _check_triggered(node: Json, at: str) -> None:
    """Its triggers; lists of another form are left to xgrammar."""
    triggers, tags = node.get("triggers"), node.get("tags")
    if not isinstance(triggers, list) or not isinstance(tags, list) or not tags:
        return
    begins: list[Any] = [one.get("begin") if isinstance(one, dict) else None for one in tags]
    if all(isinstance(one, str) for one in (*triggers, *begins)) and "" not in triggers:
        _check_triggers(triggers, begins, f"{at}/triggers")


def _check_counts(node: Json, at: str) -> None:
    for field in _COUNTS & node.keys():
        value = node[field]
        if value is not None and (type(value) is not int or abs(value) > _MOST):
            shown = str(value)[:20]
            raise refused(field, at, f"must be an integer of at most {_MOST}, got {shown}")


def _refuse_others(node: Json, known: frozenset[str], at: str) -> None:
    others = node.keys() - known
    if others:
        raise refused(min(others), at, f"is unknown; known are {', '.join(sorted(known))}")


def check_tag_schema(schema: Any, at: str) -> Any:
    """The schema for xgrammar: objects are closed where nothing else is said, as it has them in
    tags. Raises GrammarError for what it would not enforce.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"{at} allows nothing or is no schema")
    refs = SchemaRefs(schema)
    waiting, seen = [(schema, at)], dict[int, tuple[Json, str]]()
    while waiting:
        node, place = waiting.pop()
        if id(node) in seen or node is True:
            continue
        if not isinstance(node, dict):
            raise GrammarError(f"{place} allows nothing or is no schema")
        seen[id(node)] = node, place
        waiting += _inner(node, place, refs)
    check_ends(list(seen.values()), refs)
    check_depth(schema, at, refs)
    return schema


def _inner(node: Json, at: str, refs: SchemaRefs) -> list[tuple[Any, str]]:
    """Check one schema; → those within it."""
    check_shapes(node, at)
    for keyword in _BOUNDS & node.keys():
        if abs(node[keyword]) > _MOST_BOUND:
            raise refused(keyword, at, f"is beyond {_MOST_BOUND}, the most that can be enforced")
    said = KEYWORDS & node.keys()
    alone = [keyword for keyword in _ALONE if keyword in said]
    kind = node.get("type")
    if alone:
        beside = said - {alone[0]} - ({"type"} if alone[0] in ("const", "enum") else set())
        if beside:
            raise refused(
                min(beside), at, f"beside {alone[0]} cannot be enforced in a structural tag"
            )
        return _lone(node, alone[0], at, refs)
    kinds = kind if isinstance(kind, list) else [kind] if kind is not None else []
    allowed = _BESIDE_TYPE.get(kinds[0], frozenset()) if len(kinds) == 1 else frozenset[str]()
    unknown = said - allowed - {"type"}
    if unknown:
        what = f"of type {json.dumps(kind)}" if kinds else "without type"
        raise refused(min(unknown), at, f"{what} cannot be enforced in a structural tag")
    if kinds == ["object"]:
        return _object(node, at)
    if kinds == ["array"]:
        return _array(node, at)
    return []


def _lone(node: Json, keyword: str, at: str, refs: SchemaRefs) -> list[tuple[Any, str]]:
    if keyword == "$ref":
        found = refs.find(node, node["$ref"], at)
        # xgrammar reads pointers from the root, whatever an $id says, and nothing else
        pointer = node["$ref"] == "#" or node["$ref"].startswith("#/")
        if pointer and refs.find(refs.root, node["$ref"], at)[0] is found[0]:
            return [found]
        raise refused("$ref", at, "is not a pointer from the root of its schema")
    if keyword == "anyOf":
        return [(one, f"{at}/anyOf/{i}") for i, one in enumerate(node["anyOf"])]
    node[keyword] = whole(node[keyword])
    rounded = find_place(node[keyword], _is_rounded, f"{at}/{keyword}")
    if rounded is not None:
        raise GrammarError(f"{rounded[0]} is more than a double holds exactly")
    values = node["enum"] if keyword == "enum" else [node["const"]]
    kind = node.pop("type", None)
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(any(_IS[k](v) for k in kinds) for v in values):
        raise refused(keyword, at, f"has values that are not of type {json.dumps(kind)}")
    return []


def _is_rounded(value: Any) -> bool:
    """Beyond these, xgrammar writes doubles."""
    large = type(value) is int and abs(value) > _MOST_BOUND
    return large and int(float(value)) != value


_IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _object(node: Json, at: str) -> list[tuple[Any, str]]:
    properties = node.get("properties", {})
    others = node.setdefault("additionalProperties", not properties)
    if set(node.get("required", ())) - properties.keys():
        raise refused("required", at, "names what properties does not declare")
    if properties and others is not False:
        # a declared name could be written with \u escapes and pass as another one
        raise refused(
            "additionalProperties", at, "beside properties cannot be enforced in a structural tag"
        )
    inner = [(one, f"{at}/properties/{escape(name)}") for name, one in properties.items()]
    return inner if others is False else [*inner, (others, f"{at}/additionalProperties")]


def _array(node: Json, at: str) -> list[tuple[Any, str]]:
    items = node.setdefault("items", "prefixItems" not in node)
    first = [{} if one is True else one for one in node.get("prefixItems", ())]
    if first:
        node["prefixItems"] = first  # xgrammar takes no booleans there
    inner = [(one, f"{at}/prefixItems/{i}") for i, one in enumerate(first)]
    return inner if items is False else [*inner, (items, f"{at}/items")]
