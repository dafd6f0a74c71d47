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
def conversation(s: sgl.ProgramState, texts: list[str]) -> None:
    s += sgl.system(_SYSTEM)
    for turn, (text, question) in enumerate(zip(texts, _QUESTIONS, strict=True)):
        s += sgl.user("Text: " + text + "\n\n" + question)
        s += sgl.assistant(sgl.gen(f"answer_{turn}", max_tokens=32))


def _texts(first: int) -> list[str]:
    """Two places a turn."""
    places = [PLACES[(first + i) % len(PLACES)] for i in range(2 * len(_QUESTIONS))]
    pairs = zip(places[::2], places[1::2], strict=True)
    return [f"{one.text}\n{other.text}" for one, other in pairs]


def _answer(state: Any) -> str:
    return " | ".join(state[f"answer_{turn}"] for turn in range(len(_QUESTIONS)))


WORK = Work(
    "multi-turn",
    "a conversation of four turns, a text of two places in each",
    conversation,
    [{"texts": _texts(first)} for first in (0, 3, 6, 9)],
    _answer,
)
