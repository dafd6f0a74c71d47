"""What goes wrong in a program, as errors that name the line that asked for it.

JserveError
├── ExpressionError        an expression that cannot be written so (also a ValueError)
│   └── DtypeError         a dtype that gen does not know (also a RuntimeError)
├── BackendError           the model's server refused a call or could not be reached
│   └── RefusedError       it answered, with an error
└── ProgramError           a call failed; `.site` is the program line, `__cause__` what happened
    └── ProgramCancelled   the program was cancelled before the value came
"""

from __future__ import annotations

from jserve.errors import JserveError
from jserve.lang.site import Site


class ExpressionError(JserveError, ValueError):
    """An expression, or an argument of a program, that cannot be written so."""


class DtypeError(ExpressionError, RuntimeError):
    """A dtype other than int, float, bool and str."""


class BackendError(JserveError):
    """A backend refused a call, does not support it, or could not be reached."""


class RefusedError(BackendError):
    """A server answered, with an error."""


class ProgramError(JserveError):
    """What a program line asked for failed. `what` is the call in words."""

    def __init__(self, site: Site, what: str, why: BaseException | str) -> None:
        self.site = site
        super().__init__(f"{site}: {what}: {why}")


class ProgramCancelled(ProgramError):
    """The program was cancelled before this value came."""
