"""What a branch has said, to be said again where branches are joined.

Messages, not only text: roles begin and end there as they did here, and the chat template says how
that looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jserve.lang import ir
from jserve.lang.record import Step


def said_again(steps: Sequence[Step], role: str | None) -> list[ir.Expr]:
    """A branch's text and roles as expressions. `role` was open where the branch began."""
    said: list[ir.Expr] = []
    for is_role, group in itertools.groupby(steps, lambda step: step.kind == "role"):
        if not is_role:
            text = "".join(step.text for step in group)
            said += [ir.Text(text)] if text else []
            continue
        for step in group:
            assert step.name or role, "a role ends that was not open"
            said.append(ir.RoleBegin(step.name) if step.name else ir.RoleEnd(str(role)))
            role = step.name
    return said
