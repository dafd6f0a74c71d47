"""`$ref` in a JSON schema: the subschemas of one document by id, anchor and pointer."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from jserve.grammar.backend import GrammarError

Schema = dict[str, Any]

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class SchemaRefs:
    """Raises GrammarError for what lies elsewhere: nothing is fetched."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._resources: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._bases: dict[int, str] = {}
        waiting: list[tuple[Any, str]] = [(root, "")]
        while waiting:
            node, base = waiting.pop()
            if isinstance(node, dict):
                base = self._note(node, base)
            inner = node.values() if isinstance(node, dict) else node
            waiting += [(one, base) for one in inner if isinstance(one, dict | list)]

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
            if isinstance(name, str) and not name.startswith("#"):
                base = urllib.parse.urldefrag(urllib.parse.urljoin(base, name))[0]
                self._resources.setdefault(base, node)
        anchor = node.get("$anchor")
        if isinstance(anchor, str):
            self._anchors.setdefault((base, anchor), node)
        self._bases[id(node)] = base
        return base
