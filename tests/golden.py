"""The golden set: reference outputs of SmolLM2-135M-Instruct in float32, and how ours are compared
with them.

Free running is equal up to near ties: at the first differing step our token must be the reference's
runner-up and the reference's margin under the tolerance; the rest of that answer says nothing and
is not compared. Teacher forcing feeds prompt + reference output and compares every log-probability.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

DATA = Path(__file__).parent / "data" / "smollm2-135m.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt_ids: list[int]
    prompt_logprobs: list[float | None]
    output_ids: list[int]
    output_logprobs: list[float]
    top2_ids: list[int]
    margins: list[float]

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def all_logprobs(self) -> list[float | None]:
        return [*self.prompt_logprobs, *self.output_logprobs]


def load_cases(max_prompt_len: int | None = None) -> list[Case]:
    """All cases, or those whose prompt has at most `max_prompt_len` tokens."""
    fields = [f.name for f in dataclasses.fields(Case)]
    cases = [Case(**{f: c[f] for f in fields}) for c in json.loads(DATA.read_text())["cases"]]
    return [c for c in cases if max_prompt_len is None or len(c.prompt_ids) <= max_prompt_len]


def check_free_running(case: Case, output_ids: Sequence[int], tolerance: float = 0.05) -> int:
    """Assert equality up to near ties; returns how many steps were compared."""
    assert len(output_ids) == len(case.output_ids), f"{case.name}: {len(output_ids)=}"
    for step, (ours, theirs) in enumerate(zip(output_ids, case.output_ids, strict=True)):
        if ours != theirs:
            margin, runner_up = case.margins[step], case.top2_ids[step]
            assert margin < tolerance and ours == runner_up, (
                f"{case.name}: step {step} gave {ours}, reference {theirs} ({runner_up=} {margin=})"
            )
            return step
    return len(output_ids)


def check_logprobs(case: Case, ours: Sequence[float | None], tolerance: float) -> float:
    """Assert that log-probabilities of prompt + output match at every position; returns the worst
    difference."""
    reference = case.all_logprobs
    assert len(ours) == len(reference), f"{case.name}: {len(ours)=} {len(reference)=}"
    assert ours[0] is None and reference[0] is None
    worst = 0.0
    for position, (a, b) in enumerate(zip(ours[1:], reference[1:], strict=True), start=1):
        assert a is not None and b is not None, f"{case.name}: {position=} {a=} {b=}"
        assert abs(a - b) <= tolerance, f"{case.name}: {position=} {a=} {b=}"
        worst = max(worst, abs(a - b))
    return worst
