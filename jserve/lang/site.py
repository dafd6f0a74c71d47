"""Lines of users' programs: where an expression was written, so that an error can name it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

_HOME = str(Path(__file__).parent)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A line of a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


def caller() -> Site:
    """The innermost line that is being executed outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def innermost(error: BaseException) -> Site | None:
    """The innermost line outside this package that an exception came through."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(_HOME):
            found = Site(code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    return found
