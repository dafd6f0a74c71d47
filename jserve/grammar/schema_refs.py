"""`$ref` in a JSON schema: the subschemas of one document by id, anchor and pointer."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from jserve.grammar.backend import GrammarError

Schema = dict[str, Any]

#: Under these are names, and not keywords; under those are values, and not schemas.
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum"})
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class SchemaRefs:
    """Raises GrammarError for what lies elsewhere: nothing is fetched."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._resources: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._bases: dict[int, str] = {}
        self._twins: set[str | tuple[str, str]] = set()  # what several schemas are known by
        waiting: list[tuple[Any, str, str | int]] = [(root, "", "")]
        while waiting:
            node, base, under = waiting.pop()
            if isinstance(node, dict):
                base = self._note(node, base)
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            waiting += [
                (one, base, keyword)
                for keyword, one in inner
                if isinstance(one, dict | list) and (under in _NAMES or keyword not in _VALUES)
            ]

    def find(self, node: Schema, ref: str, at: str) -> tuple[Any, str]:
        """The schema that `ref` in `node` names, and what to call its place."""
        base = self._bases.get(id(node), "")
        if ref.startswith("#"):  # urljoin knows no URNs
            fragment = ref[1:]
        else:
            base, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(base, ref))
        found: Any = self._resources.get(base)
        if found is None:
            raise GrammarError(f"$ref at {at} leads out of the schema: {ref[:200]}")
        fragment = urllib.parse.unquote(fragment)
        if base in self._twins or (base, fragment) in self._twins:
            raise GrammarError(f"$ref at {at} could mean several schemas: {ref[:200]}")
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
            parts = []
        else:
            parts = fragment.split("/")[1:]
        for part in parts:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise GrammarError(f"$ref at {at} leads to nothing: {ref[:200]}")
        return found, ref[:200]

    def _note(self, node: Schema, base: str) -> str:
        """Remember what `node` is known by; → the base of references within it."""
        for keyword in ("$id", "id"):
            name = node.get(keyword)
            if isinstance(name, str) and name and not name.startswith("#"):
                base = urllib.parse.urldefrag(urllib.parse.urljoin(base, name))[0]
                if self._resources.setdefault(base, node) is not node:
                    self._twins.add(base)
        anchor = node.get("$anchor")
        known = self._anchors.setdefault((base, anchor), node) if isinstance(anchor, str) else node
        if isinstance(anchor, str) and known is not node:
            self._twins.add((base, anchor))
        self._bases[id(node)] = base
        return base
