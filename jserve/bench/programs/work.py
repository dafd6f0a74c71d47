"""A program with what it is run on: the unit of examples and of `jserve bench program`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jserve.lang import ProgramState, SglFunction


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """`items` are arguments of the program's runs; `answer` is what a state has come to, as text
    that greedy runs have in common. `needs_grammar`: it constrains what is generated.

    The program's argument `scale` says how many times over it shows its examples or texts.
    """

    name: str
    about: str
    program: SglFunction
    items: Sequence[Mapping[str, Any]]
    answer: Callable[[ProgramState], str]
    needs_grammar: bool = False

    def scaled(self, scale: int) -> Work:
        """With prompts of about that many times the length."""
        return dataclasses.replace(self, program=self.program.bind(scale=scale))
