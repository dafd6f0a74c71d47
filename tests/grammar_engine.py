"""An engine without a model whose answers follow grammars: the scripted runner heeds masks, and
token 0 ends an answer. Compiler, templates, gate and masks are real.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import numpy as np
from fake_engine import (
    CONTEXT,
    MODEL,
    PAGE,
    VOCAB,
    ByteTokenizer,
    Flight,
    ScriptedRunner,
    make_scheduler,
)

from jserve.config import Config
from jserve.engine.grammar_gate import GrammarGate
from jserve.engine.grammar_queue import GrammarQueue
from jserve.engine.loop import Loop
from jserve.grammar.choice import choose_backend, make_backend
from jserve.grammar.jump import JumpForward
from jserve.grammar.masks import Masks
from jserve.grammar.templates import Templates
from jserve.metrics.step_clock import step_timing
from jserve.scheduler.scheduler import Scheduler
from jserve.tokenizer.vocabulary import vocabulary_of

END, BEGIN, CLOSE = range(3)
TAGS = {BEGIN: b"<think>", CLOSE: b"</think>"}
ENDING_MODEL = dataclasses.replace(MODEL, eos_token_ids=(END,))


class EndingTokenizer(ByteTokenizer):
    """Token 0 is special."""

    eos_token_ids = (END,)

    def pieces(self, ids: Any, skip_special_tokens: bool) -> list[bytes]:
        return [b"" if i == END and skip_special_tokens else bytes([i]) for i in ids]


class MaskedRunner(ScriptedRunner):
    """Draws the first allowed token at or above the one of the formula, else the one below it.

    `thoughts`: what it draws, in rows with a mask, behind a token.
    """

    thoughts: ClassVar[dict[int, int]] = {}

    def finish(self, flight: Flight, mask: np.ndarray | None = None) -> None:
        before = dict(self._last)
        super().finish(flight, mask)
        if mask is None or flight.tokens is None:
            return
        assert mask.shape == (len(flight.tokens), VOCAB // 32), f"{mask.shape=}"
        plan = flight.plan
        slots = plan.slots[plan.samples]
        given = plan.token_ids[np.cumsum(plan.q_lens) - 1][plan.samples]
        for i, token in enumerate(flight.tokens.tolist()):
            bits = np.unpackbits(mask[i].view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            last = int(given[i]) if given[i] != -1 else before[int(slots[i])]
            token = self.thoughts.get(last, token) if len(allowed) < VOCAB else token
            following = [one for one in allowed if one >= token]
            flight.tokens[i] = self._last[int(slots[i])] = (following or allowed[-1:] or [-1])[0]


class ThinkingRunner(MaskedRunner):
    """Behind a ? it thinks AB.</think>, behind a ! as one who has tokens for the tags, and behind
    a # it would end."""

    thoughts: ClassVar[dict[int, int]] = {
        **dict(itertools.pairwise(b"?AB.</think>")),
        **{ord("!"): BEGIN, BEGIN: 3, 3: CLOSE, ord("#"): END},
    }


class TagTokenizer(EndingTokenizer):
    """The tags are tokens."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        data = text.encode()
        for token, tag in TAGS.items():
            data = data.replace(tag, bytes([token]))
        return list(data)

    def pieces(self, ids: Any, skip_special_tokens: bool) -> list[bytes]:
        plain = super().pieces(ids, skip_special_tokens)
        return [TAGS.get(i, piece) for i, piece in zip(ids, plain, strict=True)]


def grammar_loop(
    config: Config,
    channel: Any,
    scheduler: Scheduler,
    jumping: bool = False,
    runner: MaskedRunner | None = None,
) -> Loop:
    vocabulary = vocabulary_of(EndingTokenizer(), ENDING_MODEL)  # type: ignore[arg-type]
    backend = config.grammar.grammar_backend
    templates = Templates(lambda: make_backend(choose_backend(backend), vocabulary))
    runner = runner or MaskedRunner(0.001)
    jump = (JumpForward(EndingTokenizer(), scheduler.jump),) if jumping else ()
    facts = {
        "model_config": dataclasses.asdict(ENDING_MODEL),
        "context_length": CONTEXT,
        "page_size": PAGE,
    }
    return Loop(
        scheduler,
        runner,  # type: ignore[arg-type]
        GrammarGate(channel, GrammarQueue(templates, lambda: scheduler.paused)),
        depth=1,
        page_size=PAGE,
        masks=Masks(templates, scheduler, *jump),
        facts=facts,
        on_close=templates.close,
    )


def build(config: Config, channel: Any) -> Loop:
    scheduler = make_scheduler(timing=step_timing(), eos_token_ids=(END,))
    return grammar_loop(config, channel, scheduler)


def build_tight(config: Config, channel: Any) -> Loop:
    """So few pages that requests are retracted."""
    scheduler = make_scheduler(
        num_pages=40, eos_token_ids=(END,), schedule_conservativeness=0.05, num_slots=8
    )
    return grammar_loop(config, channel, scheduler)


def build_failing(config: Config, channel: Any) -> Loop:
    """A launch fails."""
    scheduler = make_scheduler(eos_token_ids=(END,))
    loop = grammar_loop(config, channel, scheduler)
    loop._runner.fail = {("launch", 6)}  # type: ignore[attr-defined]
    return loop


def build_jumping(config: Config, channel: Any) -> Loop:
    """What a grammar forces is appended at once."""
    scheduler = make_scheduler(timing=step_timing(), eos_token_ids=(END,))
    return grammar_loop(config, channel, scheduler, jumping=True)


def build_jumping_tight(config: Config, channel: Any) -> Loop:
    """… with so few pages that prefixes are evicted."""
    scheduler = make_scheduler(
        num_pages=40, eos_token_ids=(END,), schedule_conservativeness=0.05, num_slots=8
    )
    return grammar_loop(config, channel, scheduler, jumping=True)


def build_thinking(config: Config, channel: Any) -> Loop:
    """Answers begin with a thought where a prompt asks for it; forced text is appended."""
    scheduler = make_scheduler(eos_token_ids=(END,))
    return grammar_loop(config, channel, scheduler, jumping=True, runner=ThinkingRunner(0.001))
