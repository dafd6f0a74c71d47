"""Reasoning between <think> and </think>, before the answer: as DeepSeek R1 and Qwen3 write it."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


class Splitter:
    """Text as it comes → (reasoning, answer), what is certain of them by now.

    What may become a tag waits for the text behind it, and so do blanks: those around reasoning and
    answer are dropped.

    Args:
        thinks_at_once: the text is reasoning from its beginning, with the tag or without it.
        verbatim: an answer keeps its blanks.
        in_one_piece: reasoning comes when it has ended.
    """

    def __init__(
        self, thinks_at_once: bool, verbatim: bool = False, in_one_piece: bool = False
    ) -> None:
        self._at_once, self._verbatim, self._whole = thinks_at_once, verbatim, in_one_piece
        self._step = self._begin
        self._waiting = ""
        self._reasoning = ""  # that is kept for its end
        self._leading = True  # no reasoning, then no answer, was said yet

    def push(self, text: str) -> tuple[str, str]:
        self._waiting += text
        reasoning, answer = self._step()
        if not self._whole:
            return reasoning, answer
        self._reasoning += reasoning
        return ("", "") if self._step == self._think else (self._released(), answer)

    def finish(self) -> tuple[str, str]:
        """The rest. Reasoning that has not ended is all there is."""
        rest = self._waiting
        if self._step == self._begin and not self._at_once:
            return "", rest
        if self._step in (self._begin, self._think):
            return self._released() + self._stripped(rest.rstrip()), ""
        return self._released(), ""  # what waits behind an answer is blank

    def _begin(self) -> tuple[str, str]:
        text = self._waiting.lstrip()
        if BEGIN.startswith(text) and text != BEGIN:
            return "", ""
        if not text.startswith(BEGIN) and not self._at_once:
            self._step = self._pass
            return self._pass()
        self._waiting = text.removeprefix(BEGIN)
        self._step = self._think
        return self._think()

    def _think(self) -> tuple[str, str]:
        thought, end, behind = self._waiting.partition(END)
        if end:
            thought = self._stripped(thought.rstrip())
            self._step, self._leading = self._pass if self._verbatim else self._answer, True
            self._waiting = behind
            return thought, self._step()[1]
        sure = thought[: len(thought) - _num_of_tag(thought)].rstrip()
        self._waiting = thought[len(sure) :]
        return self._stripped(sure), ""

    def _answer(self) -> tuple[str, str]:
        sure = self._waiting.rstrip()
        self._waiting = self._waiting[len(sure) :]
        return "", self._stripped(sure)

    def _pass(self) -> tuple[str, str]:
        text, self._waiting = self._waiting, ""
        return "", text

    def _stripped(self, text: str) -> str:
        """`text` without the blanks that the whole begins with."""
        text = text.lstrip() if self._leading else text
        self._leading = self._leading and not text
        return text

    def _released(self) -> str:
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning


def split(text: str, splitter: Splitter) -> tuple[str, str]:
    """(reasoning, answer) of a whole text, by a splitter that has seen nothing yet."""
    first, last = splitter.push(text), splitter.finish()
    return first[0] + last[0], first[1] + last[1]


def _num_of_tag(text: str) -> int:
    """How many letters at the end of `text` may begin the tag that ends reasoning."""
    most = min(len(text), len(END) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(END[:n])), 0)
