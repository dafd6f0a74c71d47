"""Multi-turn chat: four questions, each with a text to read, in one conversation."""

from __future__ import annotations

from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.passages import PLACES
from jserve.bench.programs.work import Work

_SYSTEM = (
    "You are a travel librarian. Readers bring you short texts about places and ask about them. "
    "You answer from the text first, in one or two plain sentences, without lists and without "
    "repeating the question. When the text does not say something, you say that it does not, and "
    "you do not guess. You never recommend a place over another, and you keep numbers as the text "
    "has them. The library holds texts about these places:\n"
    + "\n".join(f"{one.name} in {one.country}, known for {one.known_for}" for one in PLACES)
)
_QUESTIONS = (
    "What would a visitor remember most about this place, going by the text?",
    "And this one: how many people live there, and what does the text say about its past?",
    "How does this third place differ from the one before it?",
    "Last one for today. Say in one sentence what all four have in common.",
)


@sgl.function
def conversation(s: sgl.ProgramState, first: int, scale: int = 1) -> None:
    s += sgl.system(_SYSTEM)
    for turn, question in enumerate(_QUESTIONS):
        s += sgl.user("Text: " + _text(first, turn, 2 * scale) + "\n\n" + question)
        s += sgl.assistant(sgl.gen(f"answer_{turn}", max_tokens=32))


def _text(first: int, turn: int, count: int) -> str:
    """Of `count` places a turn, one after the other from the place `first`."""
    numbers = range(first + turn * count, first + (turn + 1) * count)
    return "\n".join(PLACES[i % len(PLACES)].text for i in numbers)


def _answer(state: Any) -> str:
    return " | ".join(state[f"answer_{turn}"] for turn in range(len(_QUESTIONS)))


WORK = Work(
    "multi-turn",
    "a conversation of four turns, a text of two places in each",
    conversation,
    [{"first": first} for first in (0, 3, 6, 9)],
    _answer,
)
