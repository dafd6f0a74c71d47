"""The command line: every option as a flag of an argparse parser."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from jserve.config.options import SECTIONS, flag_of, types_of


def add_arguments(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """Add --config and every option to `parser`, one group a section, without those in `skip`.

    A flag that is not given leaves no attribute behind, so that it does not override the file. What
    the file switches on, --no-… switches off.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of these flags; --no-FLAG switches one off"
    )
    for name, section in SECTIONS.items():
        if name not in skip:
            group = parser.add_argument_group(section.__doc__)
            for option in dataclasses.fields(section):
                _add_argument(group, option)


def _add_argument(group: Any, option: dataclasses.Field[Any]) -> None:
    names = [name for name in (flag_of(option.name), option.metadata["also"]) if name]
    about, choices, kind = option.metadata["about"], option.metadata["choices"], types_of(option)[0]
    keep = {"dest": option.name, "default": argparse.SUPPRESS}
    if kind is bool:
        group.add_argument(*names, action="store_true", help=about, **keep)
        off = flag_of(f"no_{option.name}")
        group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **keep)
        return
    if option.default not in (None, ""):
        about = f"{about} [{option.default}]"
    if choices:
        about = f"{' | '.join(choices)} ({about})"
    group.add_argument(*names, type=kind, metavar=kind.__name__.upper(), help=about, **keep)
