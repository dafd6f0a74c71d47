"""The one frozen tree of options, and the ways into it: flags, a YAML file, a parsed command line.

Imports no jax; what the numbers come to on a device is resolve.py's business.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from jserve.config.options import (
    SECTIONS,
    CacheOptions,
    ExecutionOptions,
    GrammarOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    all_options,
    check_value,
    flag_of,
    negated,
)
from jserve.config.replica import Replica
from jserve.config.yaml_file import read_yaml
from jserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option. Construction checks each value alone; `resolve` checks them together.

    Flat names are unique over the sections: `config.flat()["page_size"]` is
    `config.cache.page_size`. Raises ConfigError.
    """

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    server: ServerOptions = dataclasses.field(default_factory=ServerOptions)
    cache: CacheOptions = dataclasses.field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = dataclasses.field(default_factory=SchedulerOptions)
    grammar: GrammarOptions = dataclasses.field(default_factory=GrammarOptions)
    execution: ExecutionOptions = dataclasses.field(default_factory=ExecutionOptions)
    replica: Replica = dataclasses.field(default_factory=Replica)  # no section: nobody gives it

    def __post_init__(self) -> None:
        values = self.flat()
        for _, option in all_options():
            check_value(option, values[option.name])
        if not self.model.model_path:
            raise ConfigError("--model-path is required, e.g. --model-path smollm2-135m")

    @classmethod
    def from_flags(cls, **flat: Any) -> Config:
        """Config from flat names, e.g. `from_flags(model_path="smollm2-135m", page_size=1)`; short
        ones as on the command line, `tp` for tp_size."""
        section_of = {option.name: section for section, option in all_options()}
        short = {one.metadata["also"].lstrip("-"): one.name for _, one in all_options()}
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for given, value in flat.items():
            name = short.get(given, given) if given else given
            if name != given and name in flat:
                raise ConfigError(f"{given} and {name} are one option; give it once")
            if switch := negated(name):
                raise ConfigError(f"{name} is for the command line; write {switch}=False")
            if name not in section_of:
                raise ConfigError(unknown_option(name))
            values[section_of[name]][name] = value
        return cls(**{name: section(**values[name]) for name, section in SECTIONS.items()})

    @classmethod
    def from_yaml(cls, path: str, **overrides: Any) -> Config:
        """Config from a YAML mapping of flag names (dashes or underscores); `overrides` win."""
        return cls.from_flags(**read_yaml(path) | overrides)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Config:
        """Config from what `add_arguments` parsed; given flags win over the file of --config."""
        names = {option.name for _, option in all_options()}
        flat = {name: value for name, value in vars(namespace).items() if name in names}
        if namespace.config is None:
            return cls.from_flags(**flat)
        return cls.from_yaml(namespace.config, **flat)

    def flat(self) -> dict[str, Any]:
        """All options by their flat names."""
        tree = dataclasses.asdict(self)
        return {name: value for section in SECTIONS for name, value in tree[section].items()}


def unknown_option(name: str, others: Collection[str] = ()) -> str:
    """The message for an option that is not there, with the nearest that is (`others` too)."""
    known = [*others, *(option.name for _, option in all_options())]
    if name in known or negated(name):
        return f"{flag_of(name)} is not for this command"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {flag_of(near[0])}?" if near else ""
    return f"unknown option {flag_of(name)}{hint}"
