"""Agent control: thoughts and actions in turns, an action by `select`, what it shows by a tool."""

from __future__ import annotations

from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.passages import PLACES
from jserve.bench.programs.work import Work

STEPS = 3
_INTRODUCTION = (
    "You answer questions about places by looking things up. In each step you write a thought, "
    "then an action with its argument in brackets, and you are told what you see. There are three "
    "actions. search[place] finds the text about a place. lookup[word] finds the next sentence of "
    "that text with the word in it. finish[answer] ends with the answer. Think before you act, use "
    "the shortest argument that works, and finish as soon as you know the answer.\n\n"
)
_EXAMPLES = (
    (
        "In which country is the town of Sintra?",
        (
            ("I need to find Sintra first.", "search", "Sintra"),
            "Sintra is a town in Portugal, thirty kilometres from Lisbon, known for palaces in a "
            "wooded hill range.",
            ("The text says that Sintra is in Portugal.", "finish", "Portugal"),
        ),
    ),
    (
        "Which river flows through the town of Regensburg?",
        (
            ("I need to find Regensburg and its river.", "search", "Regensburg"),
            "Regensburg is a city of 150000 people in the south of Germany with a stone bridge "
            "from the twelfth century.",
            ("The text does not name the river yet. I look for it.", "lookup", "river"),
            "At Regensburg the Danube, the second longest river of Europe, reaches its "
            "northernmost point.",
            ("The river is the Danube.", "finish", "Danube"),
        ),
    ),
    (
        "Has Ouro Preto more people than Sintra has kilometres to Lisbon?",
        (
            (
                "I know that Sintra is 30 kilometres away. I need Ouro Preto.",
                "search",
                "Ouro Preto",
            ),
            "Ouro Preto is a town of 74000 people in the hills of Brazil. Gold made it rich in the "
            "eighteenth century.",
            ("74000 is more than 30.", "finish", "yes"),
        ),
    ),
    (
        "What made the town of Roros rich?",
        (
            ("I need to find Roros.", "search", "Roros"),
            "Roros is a town of 3700 people in Norway, with wooden houses that are black with tar.",
            ("The text does not say what made it rich. I look for a mine.", "lookup", "mine"),
            "For three centuries copper was dug and smelted there, until the mine closed in 1977.",
            ("Copper made it rich.", "finish", "copper"),
        ),
    ),
)
_QUESTIONS = (
    "In which country is Bergen?",
    "How many people live in Cusco?",
    "What is carried through the lanes of Fes?",
    "Which race ends in Hobart?",
    "What is the garden of Kanazawa called?",
    "Who founded the university of Tartu?",
)


class Library:
    """The agent's tools; remembers the text that was found last."""

    def __init__(self) -> None:
        self._text = ""

    def use(self, action: str, argument: str) -> str:
        if action == "search":
            found = [place for place in PLACES if place.name.lower() in argument.lower()]
            self._text = found[0].text if found else ""
            first = self._text.partition(".")[0]
            return f"{first}." if first else "Nothing was found."
        word = argument.strip().lower()
        sentences = [one.strip() for one in self._text.split(".") if word and word in one.lower()]
        return f"{sentences[0]}." if sentences else "No sentence has that word."


@sgl.function
def answer_question(s: sgl.ProgramState, question: str, scale: int = 1) -> str:
    s += _INTRODUCTION
    for asked, steps in _EXAMPLES * scale:
        s += f"Question: {asked}\n" + "".join(map(_shown, steps)) + "\n"
    s += "Question: " + question + "\n"
    library = Library()
    for step in range(STEPS):
        s += "Thought:" + sgl.gen(f"thought_{step}", max_tokens=24, stop="\n") + "\nAction:"
        actions = [" search", " lookup", " finish"] if step < STEPS - 1 else [" finish"]
        s += sgl.select("action", actions)
        s += "[" + sgl.gen("argument", max_tokens=12, stop=["]", "\n"]) + "]\n"
        if s["action"] == " finish":
            break
        s += "Observation: " + library.use(s["action"].strip(), s["argument"]) + "\n"
    return s["argument"]


def _shown(step: str | tuple[str, str, str]) -> str:
    if isinstance(step, str):
        return f"Observation: {step}\n"
    thought, action, argument = step
    return f"Thought: {thought}\nAction: {action}[{argument}]\n"


def _answer(state: Any) -> str:
    return state.ret_value


WORK = Work(
    "agent",
    "thoughts, actions by select and observations, up to three steps",
    answer_question,
    [{"question": question} for question in _QUESTIONS],
    _answer,
)
