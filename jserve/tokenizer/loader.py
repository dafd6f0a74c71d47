"""Checkpoint → Tokenizer, once, at start."""

from __future__ import annotations

from jserve.metrics.timing import UNTIMED, Timing
from jserve.tokenizer.sources import find_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.weights.checkpoint import Checkpoint


def load_tokenizer(
    checkpoint: Checkpoint,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    timing: Timing = UNTIMED,
) -> Tokenizer:
    """As sources.find_source finds it; ConfigError when there is none."""
    return Tokenizer(find_source(checkpoint, tokenizer_path, chat_template), timing)
