"""Few-shot classification: headlines into topics by `select`, behind two dozen examples that all
programs share.
"""

from __future__ import annotations

from typing import Any

import jserve.lang as sgl
from jserve.bench.programs.work import Work

TOPICS = ["World", "Sports", "Business", "Science"]
_EXAMPLES = (
    ("Parliament votes to extend talks over the border after a night of speeches", "World"),
    ("Striker scores three in the last ten minutes to keep the title race open", "Sports"),
    (
        "Chip maker's shares fall after it warns that orders from car makers are drying up",
        "Business",
    ),
    ("Telescope finds water vapour around a planet twice the size of the earth", "Science"),
    ("Ministers of nine countries agree on a plan to share the river's water", "World"),
    ("Young sprinter breaks a record that had stood for twenty-six years", "Sports"),
    ("Central bank leaves interest rates where they are and hints at a cut in autumn", "Business"),
    ("Bones from a cave show that the island was settled earlier than thought", "Science"),
    ("Thousands march in the capital as the election result is counted again", "World"),
    ("Goalkeeper saves two penalties and sends the small club to the final", "Sports"),
    ("Airline orders sixty aeroplanes and asks its lenders for more time", "Business"),
    ("A vaccine that needs no fridge works in a first trial with two hundred people", "Science"),
    ("Peace envoy returns without an agreement but speaks of progress", "World"),
    ("Coach resigns after the ninth defeat in a row and blames nobody but himself", "Sports"),
    ("Retailer closes forty shops and moves its stock to the internet", "Business"),
    ("Physicists measure the weight of a neutrino more exactly than ever", "Science"),
    ("Flood waters reach the second city as the army builds walls of sand", "World"),
    ("Cyclist attacks on the last climb and takes the yellow jersey", "Sports"),
    ("Two rival breweries merge in a deal worth eleven billion", "Business"),
    ("Whales were found to call each other by sounds that work like names", "Science"),
    ("Government falls after a dispute over pensions, and a vote is set for May", "World"),
    ("Rain ends the match on the fourth day with both teams claiming the better of it", "Sports"),
    ("Oil price climbs to its highest in two years as exporters cut supply", "Business"),
    ("A map of the mouse brain shows half a million connections in one grain", "Science"),
)
_INTRODUCTION = (
    "Each of the following headlines belongs to one of four topics. World is for politics, wars, "
    "elections and disasters; Sports is for games, players and clubs; Business is for companies, "
    "markets and money; Science is for research, medicine, space and nature. The topic stands "
    "behind the headline.\n\n"
)
_HEADLINES = (
    "Midfielder signs for five years and promises to win the cup",
    "A probe lands on the comet and sends a first picture",
    "Prime minister flies to the summit with an offer nobody expected",
    "Car maker doubles its profit and raises the dividend",
    "Bees were seen to play with small balls for no reward",
    "Rebels and army sign a truce in the harbour city",
    "Bank buys its smaller rival for a third of last year's price",
    "Tennis champion retires at thirty-four with a last win at home",
)


@sgl.function
def classify(s: sgl.ProgramState, headline: str, scale: int = 1) -> None:
    s += _INTRODUCTION
    for example, topic in _EXAMPLES * scale:
        s += f"Headline: {example}\nTopic: {topic}\n\n"
    s += "Headline: " + headline + "\nTopic:"
    s += sgl.select("topic", [f" {topic}" for topic in TOPICS])


def _answer(state: Any) -> str:
    return state["topic"]


WORK = Work(
    "few-shot",
    "headlines into topics, by select behind 24 examples",
    classify,
    [{"headline": headline} for headline in _HEADLINES],
    _answer,
)
