"""How `select` decides: from the log-probabilities of every choice to one of them.

Each choice comes as the tokens of the prompt's tail and the choice itself, scored. Owns the three
methods and the correction of tokens that straddle the seam; who scores is a backend's business.
A method is any object with `name`, `needs_unconditional` and a call like those here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

#: (log-probability or None, token id, its text or None), as servers send them.
Entry = Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The choice, and what it was made from."""

    decision: str
    meta_info: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Per choice, in their order. `unconditional` only for a method that needs it."""

    choices: tuple[str, ...]
    tokens: list[list[Entry]]  # tail of the prompt and the choice, healed
    outputs: list[list[Entry]]  # what the server generated behind it, usually nothing
    unconditional: list[list[Entry]] | None = None  # the same tokens without what came before

    @property
    def normalized(self) -> list[float]:
        """Mean log-probability of a token, of those that have one."""
        return [_mean(_values(entries)) for entries in self.tokens]


@runtime_checkable
class ChoicesMethod(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_unconditional(self) -> bool: ...

    def __call__(self, scores: Scores) -> ChoicesDecision: ...


def heal(prompt: str, entries: list[Entry]) -> list[Entry]:
    """Without the first token when the prompt ends with its text: that token is the prompt's own,
    and says nothing about the choice."""
    text = entries[0][2] if entries else None
    return entries[1:] if text and prompt.endswith(text) else entries


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenLengthNormalized:
    name: str = "token_length_normalized"
    needs_unconditional: bool = False

    def __call__(self, scores: Scores) -> ChoicesDecision:
        """The highest mean log-probability of a token."""
        return _decide(scores, _argmax(scores.normalized))


@dataclasses.dataclass(frozen=True, slots=True)
class _GreedyTokenSelection:
    name: str = "greedy_token_selection"
    needs_unconditional: bool = False

    def __call__(self, scores: Scores) -> ChoicesDecision:
        """Token by token the likeliest, as far as the choices differ. A choice that has ended goes
        on with its mean.

        The same token behind the same tokens is equally likely, whatever rounding says of it in two
        rows of a batch.
        """
        kept = [[one for one in entries if one[0] is not None] for entries in scores.tokens]
        width = max(map(len, kept))
        matrix = [
            _values(entries) + [mean] * (width - len(entries))
            for entries, mean in zip(kept, scores.normalized, strict=True)
        ]
        ids = [[one[1] for one in entries] + [None] * (width - len(entries)) for entries in kept]
        alive = list(range(len(matrix)))
        for column in range(width):
            if len(alive) == 1:
                break
            best = max(alive, key=lambda i: matrix[i][column])
            token, value = ids[best][column], matrix[best][column]
            alive = [
                i
                for i in alive
                if matrix[i][column] == value or (token is not None and ids[i][column] == token)
            ]
        return _decide(scores, alive[0], greedy_logprob_matrix=matrix)


@dataclasses.dataclass(frozen=True, slots=True)
class _UnconditionalLikelihoodNormalized:
    name: str = "unconditional_likelihood_normalized"
    needs_unconditional: bool = True

    def __call__(self, scores: Scores) -> ChoicesDecision:
        """The highest mean gain in log-probability that a token has from what came before it."""
        assert scores.unconditional is not None, f"{self.name} needs unconditional scores"
        pairs = zip(scores.tokens, scores.unconditional, strict=True)
        gains = [
            _mean([(a[0] or 0.0) - (b[0] or 0.0) for a, b in zip(own, alone, strict=True)])
            for own, alone in pairs
        ]
        return _decide(
            scores,
            _argmax(gains),
            unconditional_token_logprobs=scores.unconditional,
            normalized_unconditional_prompt_logprobs=gains,
        )


token_length_normalized: ChoicesMethod = _TokenLengthNormalized()
greedy_token_selection: ChoicesMethod = _GreedyTokenSelection()
unconditional_likelihood_normalized: ChoicesMethod = _UnconditionalLikelihoodNormalized()


def _decide(scores: Scores, index: int, **more: Any) -> ChoicesDecision:
    meta = {
        "normalized_prompt_logprobs": scores.normalized,
        "input_token_logprobs": scores.tokens,
        "output_token_logprobs": scores.outputs,
        **more,
    }
    return ChoicesDecision(scores.choices[index], meta)


def _argmax(values: Sequence[float]) -> int:
    """The first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def _values(entries: Sequence[Entry]) -> list[float]:
    return [entry[0] for entry in entries if entry[0] is not None]


def _mean(values: Sequence[float]) -> float:
    """Of nothing: less than of anything, so that what cannot be scored is not chosen."""
    return sum(values) / len(values) if values else -math.inf
