"""Finds stop regexes in text that arrives piece by piece, beside stop strings, and holds back what
may begin a match. It knows no tokens. Requests without stop regexes never come here.

After each piece the text so far is searched; all that was shown stays shown, so a match begins in
what is not. Held back is what a match may begin in when more text comes, up to 4,096 characters.
Patterns are Python's (`re`); the engine is `regex`, which can say that the end of a text may begin
a match, and give up after a time.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import regex

from jserve.errors import RequestError
from jserve.tokenizer.stop_strings import StopFilter, StopMatcher
from jserve.types import SamplingParams

MAX_STOP_REGEXES = 32
MAX_PATTERN_BYTES = 256
MAX_HELD = 4096  # characters
_CONTEXT = 1024  # shown characters that lookbehind and \b may still see
_MAX_REPEAT_DEPTH = 4  # compiling takes twice as long with each

# Seconds of processor time for searching, so that no pattern stops the event loop for everybody: a
# burst, and what each piece of text adds to what is left. A common pattern takes 10 to 15 µs.
_BURST = 0.02
_SHARE = 0.000_25
_SHARE_OF_PATTERN = 0.000_05

_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|\)[*+?{]?|[*+?{]", re.DOTALL)
_PARTS = re.compile(
    r"\(\?(?:<[=!]|[!>])|[$^]|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([*+?]|\{\d*,?\d*\})\+", re.DOTALL
)
_BRACES = re.compile(r"(\\.)|\{(?!\d*,\d*\}|\d+\})", re.DOTALL)


class RegexFilter:
    """A StopFilter for regexes and stop strings. After each piece a string wins over a regex, and
    an earlier regex over a later one. `stopped` is the string, or the pattern of the regex.
    """

    def __init__(self, patterns: Sequence[str], stops: Sequence[str], trim: bool) -> None:
        self.stopped: str | None = None
        self._patterns = patterns
        self._stops = StopMatcher(stops)
        self._trim = trim
        self._text = ""  # some of what was shown, then all that was not
        self._num_held = 0  # characters of it that were not shown
        self._share = _SHARE + _SHARE_OF_PATTERN * len(patterns)
        self._allowance = _BURST

    def feed(self, text: str) -> str:
        """What of the held text and `text` can be shown; sets `stopped`. Raises RequestError when
        a regex takes too long.
        """
        if not text:
            return ""
        found = self._stops.feed(text)
        begin, whole = len(self._text) - self._num_held, self._text + text
        if found is None:
            self.stopped, start, end = self._search(whole, begin)
        else:
            self.stopped, end = found[0], len(self._text) + found[1]
            start = end - len(self.stopped)
        if self.stopped is None:
            shown = min(max(start, len(whole) - MAX_HELD), len(whole) - self._stops.num_matched)
            self._text = whole[max(0, shown - _CONTEXT) :]
            self._num_held = len(whole) - shown
        else:
            shown, self._num_held = (start if self._trim else end), 0
        return whole[begin:shown]

    def finish(self, text: str) -> str:
        """As `feed`, for the last text: then nothing is held back."""
        shown = self.feed(text)
        return shown + self._text[len(self._text) - self._num_held :]

    def _search(self, text: str, begin: int) -> tuple[str | None, int, int]:
        """The pattern that matches from `begin` on, and where; or None, and where a match may begin
        when more text comes.
        """
        first = len(text)
        for pattern in self._patterns:
            stop = compiled(pattern)
            if match := self._found(pattern, stop.whole, text, begin):
                return pattern, *match.span()
            match = self._found(pattern, stop.begun, text, begin, partial=True)
            first = first if match is None else min(first, match.start())
        self._allowance = min(self._allowance + self._share, _BURST)
        return None, first, len(text)

    def _found(
        self, pattern: str, stop: regex.Pattern[str], text: str, begin: int, partial: bool = False
    ) -> regex.Match[str] | None:
        """The first match, on this thread's allowance. The library counts the time of all threads,
        so what it gives up too early is searched for again.
        """
        while self._allowance > 0:
            started = time.thread_time()
            try:
                return stop.search(text, begin, partial=partial, timeout=self._allowance)
            except TimeoutError:
                continue
            finally:
                self._allowance -= time.thread_time() - started
        raise _too_slow(pattern)


def text_filter(sampling: SamplingParams) -> StopFilter | RegexFilter:
    """What looks for a request's stop strings and regexes; it has some."""
    trim = not sampling.no_stop_trim
    if sampling.stop_regex:
        return RegexFilter(sampling.stop_regex, sampling.stop, trim)
    return StopFilter(sampling.stop, trim)


def check_stop_regexes(patterns: Sequence[str]) -> None:
    """Raise RequestError unless there are few enough and each can be searched for. May take tens of
    milliseconds.
    """
    if len(patterns) > MAX_STOP_REGEXES:
        message = f"stop_regex must be at most {MAX_STOP_REGEXES} patterns, got {len(patterns)}."
        raise RequestError(message, "stop_regex")
    for pattern in patterns:
        compiled(pattern)


class StopRegex(NamedTuple):
    """`whole` matches as the pattern does. `begun` never matches, but does so partially from where
    the end of a text may begin a match.
    """

    whole: regex.Pattern[str]
    begun: regex.Pattern[str]


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> StopRegex:
    """Raises RequestError saying what is wrong with `pattern`, and where."""
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if size > MAX_PATTERN_BYTES:
        message = f"stop_regex must be patterns of at most {MAX_PATTERN_BYTES} bytes, got {size}."
        raise RequestError(message, "stop_regex")
    try:
        flags = re.compile(pattern).flags
        if flags & re.VERBOSE or re.search(r"\(\?(#|[a-zA-Z]*x)", pattern):
            raise _refused(pattern, "comments and the flag x are not supported")
        if (depth := _repeat_depth(pattern)) > _MAX_REPEAT_DEPTH:
            problem = f"{depth} repeats inside each other, at most {_MAX_REPEAT_DEPTH} are allowed"
            raise _refused(pattern, problem)
        # NOTE: what `re` reads as a literal brace may be regex's fuzzy matching.
        safe = _BRACES.sub(lambda match: match[1] or r"\{", pattern)
        whole = regex.compile(safe, regex.VERSION0)
        begun = regex.compile(_relaxed(safe), regex.VERSION0)
        if whole.search("", timeout=_BURST):
            raise _refused(pattern, "it matches the empty text")
    except TimeoutError:
        raise _too_slow(pattern) from None
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise _refused(pattern, f"{error.msg}{where}") from None
    except (regex.error, OverflowError, RecursionError) as error:
        raise _refused(pattern, str(error)) from None
    return StopRegex(whole, begun)


def _relaxed(pattern: str) -> str:
    """`pattern`, then the end of the text, then one more character.

    So it can match partially only, from every place that reaches the end. What may hold once there
    is more text, but does not yet, always holds here: `regex` would call it failed, not begun.
    """
    keep_start = not re.search(r"\(\?[a-zA-Z]*m", pattern)

    def relax(match: re.Match[str]) -> str:
        part = match[0]
        if part in ("(?<=", "(?<!", "(?!"):
            return "(?=|"
        if part == "(?>":
            return "(?:"
        if part in (r"\b", r"\B", "$", "^"):
            return part if part == "^" and keep_start else "(?:)"
        return match[1] or part

    return rf"(?:{_PARTS.sub(relax, pattern)})\Z(?s:.)"


def _repeat_depth(pattern: str) -> int:
    """How deep repeats are nested in each other."""
    levels = [0]
    for token in _TOKENS.findall(pattern):
        if token[0] == "(":
            levels.append(0)
        elif token[0] == ")" and len(levels) > 1:
            inner = levels.pop() + (len(token) > 1)
            levels[-1] = max(levels[-1], inner)
        elif token in "*+?{":
            levels[-1] = max(levels[-1], 1)
    return max(levels)


def _refused(pattern: str, problem: str) -> RequestError:
    return RequestError(f"stop_regex {pattern!r} cannot be used: {problem}.", "stop_regex")


def _too_slow(pattern: str) -> RequestError:
    advice = "avoid repeats inside repeats"
    message = f"stop_regex {pattern!r} takes too long to search for in this text; {advice}."
    return RequestError(message, "stop_regex")
