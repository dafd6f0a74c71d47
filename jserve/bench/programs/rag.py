"""Retrieval-augmented generation: branches judge texts, the answer uses what they kept."""

from __future__ import annotations

import re
from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.passages import PLACES, Place
from jserve.bench.programs.work import Work

RETRIEVED = 3
_INTRODUCTION = (
    "Questions are answered from numbered texts. First each text is judged: it is useful when it "
    "names the place that the question is about and says something that helps to answer it, and "
    "useless when it is about another place or only shares a word with the question. Then the "
    "answer is given in one short sentence, from useful texts alone and in their words, and "
    "the number of the text stands behind it in brackets. Nothing is added that no text says.\n\n"
    "Text 1: Sintra is a town in Portugal, thirty kilometres from Lisbon, known for palaces that "
    "kings and rich merchants built in a wooded range of hills. Fog comes up from the sea in the "
    "afternoon, and the air is cooler than in the capital. About 33000 people live in its old "
    "parishes.\n"
    "Text 2: Regensburg is a city of about 150000 people in the south of Germany. Its stone bridge "
    "over the Danube was built in the twelfth century, and was for eight hundred years the only "
    "one. A small kitchen beside it has sold sausages ever since it was built.\n"
    "Text 3: Roros is a town in the mountains of Norway with about 3700 inhabitants. Copper was "
    "dug and smelted there for three centuries, until the mine closed in 1977. Winters are so cold "
    "that fifty degrees below zero have been measured.\n"
    "Question: What was dug at Roros?\n"
    "Text 1 is useless. Text 2 is useless. Text 3 is useful.\n"
    "Answer: Copper was dug at Roros for three centuries. [3]\n\n"
    "The next question has texts of its own.\n\n"
)
_QUESTIONS = (
    "What holds up the pines in the garden of Kanazawa?",
    "Why are the buildings of Oaxaca low?",
    "What did the weavers of Ghent make from English wool?",
    "What do people give to the monks of Luang Prabang?",
)


@sgl.function
def answer_from_texts(s: sgl.ProgramState, question: str, scale: int = 1) -> str:
    s += _INTRODUCTION
    texts = retrieve(question, RETRIEVED * scale)
    for number, place in enumerate(texts, 1):
        s += f"Text {number}: {place.text}\n"
    s += "Question: " + question + "\n"
    judges = s.fork(len(texts))
    judges += lambda i: f"Text {i + 1} is" + sgl.select("verdict", [" useful", " useless"])
    judges.join()
    for number, verdict in enumerate(s["verdict"], 1):
        s += f"Text {number} is{verdict}. "
    s += "\nAnswer:" + sgl.gen("answer", max_tokens=32, stop="\n")
    return s["answer"]


def retrieve(question: str, count: int = RETRIEVED) -> list[Place]:
    """The places whose texts share the most words with the question, as many as there are."""
    wanted = _words(question)
    ranked = sorted(PLACES, key=lambda place: -len(wanted & _words(f"{place.name} {place.text}")))
    return ranked[:count]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def _answer(state: Any) -> str:
    return f"{state['answer']} {state['verdict']}"


WORK = Work(
    "rag",
    "three retrieved texts judged in branches, then an answer from them",
    answer_from_texts,
    [{"question": question} for question in _QUESTIONS],
    _answer,
)
