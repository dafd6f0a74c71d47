"""Six programs, one for each workload of the SGLang paper, as examples and for `jserve bench
program`. `python -m jserve.bench.programs --help` runs them.
"""

from __future__ import annotations

from jserve.bench.programs import agent, few_shot, json_decode, multi_turn, rag, tree_of_thought
from jserve.bench.programs.work import Work

__all__ = ["PROGRAMS", "Work"]

PROGRAMS: dict[str, Work] = {
    module.WORK.name: module.WORK
    for module in (agent, tree_of_thought, few_shot, json_decode, rag, multi_turn)
}
