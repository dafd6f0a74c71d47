"""Tree of thought: branches propose plans for a problem, branches of those work them out, and a
`select` takes the best.
"""

from __future__ import annotations

from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.work import Work

PLANS = 2
SOLUTIONS = 2
_EXAMPLES = (
    (
        "A baker makes 12 trays of 8 rolls. She sells 61 rolls in the morning and 22 at noon. How "
        "many are left?",
        "Count all rolls first, then take away what was sold.",
        "12 trays of 8 rolls are 12 * 8 = 96 rolls. Sold are 61 + 22 = 83. Left are 96 - 83 = 13.",
        "13",
    ),
    (
        "A train leaves at 9:40 and arrives at 13:05. It stops for 15 minutes on the way. How long "
        "does it move?",
        "Find the whole time, then take away the stop.",
        "From 9:40 to 13:05 are 3 hours and 25 minutes, which is 205 minutes. Without the stop of "
        "15 minutes it moves for 205 - 15 = 190 minutes.",
        "190",
    ),
    (
        "Three friends share a bill of 84. Ann pays twice as much as Ben, and Cal pays as much as "
        "Ben. How much does Ann pay?",
        "Count shares: how many of Ben's parts make the bill.",
        "Ann pays 2 parts, Ben 1 and Cal 1, together 4 parts. One part is 84 / 4 = 21. Ann pays "
        "2 * 21 = 42.",
        "42",
    ),
    (
        "A garden is 14 metres long and 9 metres wide. A fence costs 6 for each metre. What does a "
        "fence around the garden cost?",
        "Find the length of the fence, then its price.",
        "Around the garden are 2 * 14 + 2 * 9 = 46 metres. The fence costs 46 * 6 = 276.",
        "276",
    ),
    (
        "A tank holds 240 litres and is one third full. A pump adds 8 litres a minute. How many "
        "minutes until it is full?",
        "Find what is missing, then divide by what comes in a minute.",
        "One third of 240 is 80, so 240 - 80 = 160 litres are missing. 160 / 8 = 20 minutes.",
        "20",
    ),
    (
        "A library lends 35 books on Monday, 15 fewer on Tuesday and twice as many as on Tuesday "
        "on Wednesday. How many in all?",
        "Work out each day, then add the days.",
        "Tuesday: 35 - 15 = 20. Wednesday: 2 * 20 = 40. In all: 35 + 20 + 40 = 95.",
        "95",
    ),
)
_INTRODUCTION = (
    "Problems are solved in three steps: a plan in one sentence, the work that follows the plan, "
    "and the answer as a number. Plans differ in where they begin; work shows every sum that it "
    "uses, and no sum that it does not.\n\n"
)
_PROBLEMS = (
    "A farmer packs 150 apples into boxes of 12. How many boxes are full, and how many apples are "
    "left over? Give the number left over.",
    "Tickets cost 9 for adults and 5 for children. A group of 4 adults and 7 children pays with a "
    "hundred. How much comes back?",
    "A hiker walks 5 kilometres an hour for 3 hours, rests, and walks 4 kilometres an hour for 2 "
    "hours. How far does the hiker walk?",
)


@sgl.function
def solve(s: sgl.ProgramState, problem: str, scale: int = 1) -> None:
    s += _INTRODUCTION
    for number, (question, plan, work, answer) in enumerate(_EXAMPLES * scale, 1):
        s += f"Problem {number}: {question}\nPlan: {plan}\nWork: {work}\nAnswer: {answer}\n\n"
    s += f"Problem {len(_EXAMPLES) * scale + 1}: " + problem + "\n"
    plans = s.fork(PLANS)
    plans += lambda i: f"Plan {'AB'[i]}:" + sgl.gen("plan", max_tokens=24, stop="\n") + "\nWork:"
    for plan in plans:
        works = plan.fork(SOLUTIONS)
        works += lambda i: (
            [" First,", " Start with"][i] + sgl.gen("work", max_tokens=40, stop=["\n", "Problem"])
        )
        works += "\nAnswer:" + sgl.gen("result", max_tokens=8, stop="\n")
        works.join()
    plans.join()
    for letter, works, results in zip("AB", s["work"], s["result"], strict=True):
        for work, result in zip(works, results, strict=True):
            s += f"Solution {letter}:{work} Answer:{result}\n"
    s += "The better plan is" + sgl.select("best", [" A", " B"])


def _answer(state: Any) -> str:
    return f"{state['best']}: {state['result']}"


WORK = Work(
    "tree-of-thought",
    "two plans, two solutions of each, the better plan by select",
    solve,
    [{"problem": problem} for problem in _PROBLEMS],
    _answer,
)
