"""A YAML file of flags, read as the command line reads them: each name once, and each value by its
option's type, whatever YAML takes it for (`off`, `0123` and `1e5` are text to an option of text).

Refuses to know what an option means, and names that are no option's: tree.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from jserve.config.options import all_options, negated, types_of
from jserve.errors import ConfigError

_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_WORDS = {"scalar": "one value", "sequence": "a list", "mapping": "a mapping"}
_TRUE = ("yes", "true", "on")


def read_yaml(path: str) -> dict[str, Any]:
    """Values by their options' names, or what else is there as a key. Raises ConfigError."""
    root = _parsed(path)
    if root is None or root.id != "mapping":
        what = "is empty" if root is None else f"holds {_WORDS[root.id]}"
        raise ConfigError(f"--config {path} must map flag names to values, but {what}")
    options = {option.name: option for _, option in all_options()}
    also = ((one.metadata["also"].lstrip("-"), name) for name, one in options.items())
    aliases: dict[str, str] = {alias: name for alias, name in also if alias}
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key, node in root.value:
        where = f"--config {path}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ConfigError(f"{where}: {_WORDS[key.id]} is no name of a flag")
        name = str(key.value).replace("-", "_")
        if switch := negated(name).replace("_", "-"):
            message = f"{key.value} is for the command line; write {switch}: false"
            raise ConfigError(f"{where}: {message}")
        if key.value.startswith("-"):
            raise ConfigError(f"{where}: write {key.value.lstrip('-')}, without dashes in front")
        name = aliases.get(name, name)
        if name in lines:
            raise ConfigError(f"{where}: {key.value} was given in line {lines[name]}; give it once")
        if node.id != "scalar":
            raise ConfigError(f"{where}: {key.value} must be one value, not {_WORDS[node.id]}")
        lines[name] = key.start_mark.line + 1
        values[name] = _value(node, options[name]) if name in options else node.value
    return values


def _parsed(path: str) -> Any:
    """The root node of the one document, None of an empty file. Nothing of it is constructed."""
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None


def _value(node: Any, option: dataclasses.Field[Any]) -> Any:
    """What is of another type stays text, for the option's own check to refuse."""
    kind = types_of(option)[0]
    if node.tag == _NULL:
        return None
    if kind is bool and node.tag == _BOOL:
        return node.value.lower() in _TRUE
    if kind in (str, bool) or node.style is not None:  # quoted
        return node.value
    try:
        return kind(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return node.value
